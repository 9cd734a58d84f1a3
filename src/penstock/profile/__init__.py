"""Profile: seconds and bytes per op on one kind of device."""

from penstock.profile.kinds import Profiles as Profiles
from penstock.profile.profile import Profile as Profile
