"""Plan: the decisions, what goes together, and the program that a plan is lowered to."""

from penstock.plan.agreement import Agreement as Agreement
from penstock.plan.overlap import Overlap as Overlap
from penstock.plan.placement import Placement as Placement
from penstock.plan.plan import By as By
from penstock.plan.plan import Decision as Decision
from penstock.plan.plan import Plan as Plan
from penstock.plan.plan import Prediction as Prediction
from penstock.plan.plan import Units as Units
from penstock.plan.plan import check_fits as check_fits
from penstock.plan.plan import decide as decide
from penstock.plan.plan import diff as diff
from penstock.plan.plan import divided as divided
from penstock.plan.plan import is_asynchronous as is_asynchronous
from penstock.plan.plan import plan_by_hand as plan_by_hand
from penstock.plan.plan import repeats_all as repeats_all
from penstock.plan.plan import schedule_of as schedule_of
from penstock.plan.stage import StagePlan as StagePlan
from penstock.plan.terms import Buffers as Buffers
from penstock.plan.terms import StepTerms as StepTerms
from penstock.program.instructions import Guarding as Guarding
from penstock.program.passes.offload import Offloaded as Offloaded
from penstock.program.passes.shard import Sharding as Sharding
from penstock.schedule.recipe import name_of as name_of
