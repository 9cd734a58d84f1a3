"""Estimate: time and memory of whole configurations in closed form, for devices not here."""

from penstock.estimate.constants import Constants as Constants
from penstock.estimate.datasheet import DEVICES as DEVICES
from penstock.estimate.datasheet import Datasheet as Datasheet
from penstock.estimate.described import read as read
from penstock.estimate.fit import fit as fit
from penstock.estimate.known import MODELS as MODELS
from penstock.estimate.pool import Pooled as Pooled
from penstock.estimate.predict import Estimate as Estimate
from penstock.estimate.predict import predict as predict
from penstock.estimate.sample import Sample as Sample
from penstock.estimate.shipped import load as load
from penstock.estimate.training_run import TrainingRun as TrainingRun
from penstock.estimate.transformer import Transformer as Transformer
