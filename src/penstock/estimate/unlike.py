"""Unlike: what the device of a stage reaches of its peaks, beside the mean of its run's devices.

The constants of a run are those of the mean of its devices.  Where these are unlike, each reaches
another share: less of its FLOP/s where these have few watts, less of a fast memory.  By how much is
what `priors` says of any device; so no constant is added.

Ignores:  that the trend which was fitted is another one, by a little.
"""

import functools
import math

from penstock.estimate.datasheet import Datasheet
from penstock.estimate.priors import TIME_PRIORS, z_of
from penstock.estimate.site import site_of

_OF_DEVICE = "power", "memory"  # axes: of links, all on the way count


@functools.lru_cache(maxsize=1024)
def beside_mean(devices: tuple[Datasheet, ...], at: int) -> dict[str, float]:
    """Return by the term what 1 / efficiency of a device is, over that of the mean of all.

    Empty where all are alike.
    """
    if len(set(devices)) == 1:
        return {}
    mean, own = (site_of(each, 1, sharded=0.0).axes for each in (devices, (devices[at],)))
    found: dict[str, float] = {}
    for prior in TIME_PRIORS:
        if prior.axis in _OF_DEVICE:
            z, slope = z_of(prior, prior.value), prior.slope[0]
            inverses = (1 + math.exp(z + slope * each[prior.axis]) for each in (own, mean))
            found[prior.name] = next(inverses) / next(inverses)
    return found
