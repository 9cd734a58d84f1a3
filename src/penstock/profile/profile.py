"""Profile: seconds and bytes per op on one kind of device, measured or estimated."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from penstock.errors import ProfileError
from penstock.files import Json, read_json, write_text
from penstock.profile.expert_load import ExpertLoad
from penstock.typed import damage, typed_flat

_MOST = 1e15  # seconds or bytes: sums of them stay numbers
How = Literal["measured", "estimated"]
_UPDATE = (
    "update_s_per_byte",
    "update_s",
    "state_bytes_per_byte",
    "state_bytes_per_tensor",
    "update_workspace_per_byte",
    "update_workspace_of_largest",
    "update_workspace_of_second",
)
_INSIDE = "update", "copying", "basis"  # records, whose fields stand in a file beside the others
_PACKING = "pack_s", "pack_s_per_byte", "unpack_s", "unpack_s_per_byte"


def _check_numbers(record: object, names: Sequence[str]) -> None:
    for name in names:
        value: float | tuple[float, ...] = getattr(record, name)
        row = value if isinstance(value, tuple) else (value,)
        wrong = [number for number in row if not 0 <= number < _MOST]
        if wrong:
            raise ProfileError(f"{name} holds {wrong[0]}; it must be 0 or more, below {_MOST:g}")


@dataclass(frozen=True, slots=True)
class PackCost:
    """Seconds of packing and unpacking a tensor whose numbers have `bits` on the wire.

    pack_s, unpack_s:   of any tensor; the others for each of its bytes, unpacked.
    """

    bits: int
    pack_s: float
    pack_s_per_byte: float
    unpack_s: float
    unpack_s_per_byte: float

    def __post_init__(self) -> None:
        _check_numbers(self, _PACKING)


@dataclass(frozen=True, slots=True)
class FusedCost:
    """The cost of a segment whose ops are compiled, as far as they can be.

    segment:     its digest.
    ratio:       of its seconds to those of its ops one by one.
    peak_bytes:  most bytes held above those before, its messages included.
    """

    segment: str
    ratio: float
    peak_bytes: int

    def __post_init__(self) -> None:
        _check_numbers(self, ("ratio", "peak_bytes"))


@dataclass(frozen=True, slots=True)
class UpdateCost:
    """What the optimizer takes, and holds.

    update_s_per_byte, update_s:  per byte of parameter, and per call; clipping is a part of it.
    state_bytes_per_byte:     state held per byte of parameter.
    state_bytes_per_tensor:   besides, per parameter: numbers such as a count of steps.
    update_workspace_per_byte, update_workspace_of_largest, update_workspace_of_second:   held while
                              it runs, per byte of parameter, and besides of the largest and of the
                              second largest of those that it updates.
    update_order:             names of parameters as it takes them, one after another: in place of
                              the second largest counts the one before; empty: unknown.
    """

    update_s_per_byte: float
    update_s: float
    state_bytes_per_byte: float
    update_workspace_per_byte: float
    update_workspace_of_largest: float = 0.0
    update_workspace_of_second: float = 0.0
    state_bytes_per_tensor: float = 0.0
    update_order: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_numbers(self, _UPDATE)

    def times(self, factor: float) -> "UpdateCost":
        """Return the cost of an update that takes so many times the seconds."""
        each_s, call_s = factor * self.update_s_per_byte, factor * self.update_s
        return replace(self, update_s_per_byte=each_s, update_s=call_s)


@dataclass(frozen=True, slots=True)
class CopyCost:
    """Seconds of copying a version of the weights, and of moving tensors to far memory, or back.

    far_s:   of any tensor; the others for each byte.
    """

    copy_s_per_byte: float
    far_s_per_byte: float
    far_s: float = 0.0

    def __post_init__(self) -> None:
        _check_numbers(self, ("copy_s_per_byte", "far_s_per_byte", "far_s"))


@dataclass(frozen=True, slots=True)
class ProfileBasis:
    """What the seconds of a profile rest on.

    versions:   of what ran it; beside: ranks that computed beside the measured one, as they will in
                the run.
    samples, error:   of an estimate that was learned from runs on such devices: of how many
                segments they told, and twice the relative standard deviation of the seconds of a
                micro-batch; 0 samples: what runs elsewhere have taught of such
                devices (estimate/traced.py); 0, 0: from the device's peaks alone.
    steps, runs:   of a measured one, on how many sampled steps of how many runs its seconds rest
                besides; 0, 0: on none.
    """

    device: str
    versions: str
    how: How
    beside: int
    samples: int = 0
    error: float = 0.0
    steps: int = 0
    runs: int = 0

    def __post_init__(self) -> None:
        if self.how not in get_args(How):
            raise ProfileError(f"how is {self.how!r}, not one of {', '.join(get_args(How))}")
        _check_numbers(self, ("samples", "error", "steps", "runs"))

    @property
    def is_measured(self) -> bool:
        """Return whether its ops were timed, on such a device."""
        return self.how == "measured"


@dataclass(frozen=True, slots=True)
class Profile:
    """Seconds of every node of one graph on one kind of device.

    graph:      digest of the graph.
    op_s:       seconds of each node of the graph, 0 for inputs.
    workspace_bytes:          held by each node only while it runs.
    call_s:                   per segment: calling it, collecting inputs and results.
    accumulate_s_per_byte:    adding a gradient to the step's sum, per byte of parameter.
    kind:       name of the cluster's device kind that it describes; "" for any.
    loads:      rows that each expert of a mixture sees, of each layer; the seconds of a step whose
                experts ranks divide are those of the rank that has most of them.
    packing:    what packing costs, by bits; empty where it was not asked for.
    fused:      of the segments that were compiled; others take as long as their ops, one by one.
    """

    graph: str
    basis: ProfileBasis
    op_s: tuple[float, ...]
    workspace_bytes: tuple[int, ...]
    call_s: float
    accumulate_s_per_byte: float
    update: UpdateCost
    copying: CopyCost
    kind: str = ""
    packing: tuple[PackCost, ...] = ()
    fused: tuple[FusedCost, ...] = ()
    loads: tuple[ExpertLoad, ...] = ()

    def __post_init__(self) -> None:
        if len(self.op_s) != len(self.workspace_bytes):
            raise ProfileError(f"{len(self.op_s)} times, {len(self.workspace_bytes)} workspaces")
        names = "op_s", "workspace_bytes", "call_s", "accumulate_s_per_byte"
        _check_numbers(self, names)

    @property
    def has_workspace(self) -> bool:
        """Return whether an op holds something only while it runs."""
        return any(self.workspace_bytes)

    def packing_s(self, bits: int, sizes: Sequence[int]) -> tuple[float, float]:
        """Return the seconds of packing and of unpacking tensors of `size_bytes`.

        With bits that were not measured, as with the slowest that were; nothing where none were.
        """
        rows = [row for row in self.packing if row.bits == bits] or self.packing
        count, size = len(sizes), sum(sizes)
        packs = (row.pack_s * count + row.pack_s_per_byte * size for row in rows)
        unpacks = (row.unpack_s * count + row.unpack_s_per_byte * size for row in rows)
        return max(packs, default=0.0), max(unpacks, default=0.0)

    @property
    def micro_batch_s(self) -> float:
        """Return the seconds of all ops of one micro-batch."""
        return sum(self.op_s)

    def __repr__(self) -> str:
        return f"<{self}>"

    def __str__(self) -> str:
        return (
            f"Profile of graph {self.graph} on {self.basis.device}, {self.basis.how}: "
            f"{1e3 * self.micro_batch_s:.2f} ms per micro-batch"
        )

    def to_json(self) -> dict[str, Json]:
        """Return the profile as JSON values."""
        fields = asdict(self)
        for name in _INSIDE:
            fields |= fields.pop(name)
        return {"penstock": "profile", **json.loads(json.dumps(fields))}

    def save(self, path: Path | str) -> None:
        """Write the profile as JSON."""
        write_text(path, json.dumps(self.to_json()))

    @classmethod
    def load(cls, path: Path | str) -> "Profile":
        """Read a profile written by `save`.

        Raises:   ProfileError: missing, damaged or not a profile.
        """
        return cls.from_json(read_json(path, ProfileError, "profile"), path)

    @classmethod
    def from_json(cls, content: Json, path: Path | str) -> "Profile":
        """Return the profile that `content` says, as `to_json` gave it; it was read from `path`.

        Raises:   ProfileError: damaged or not a profile.
        """
        if not isinstance(content, dict) or content.get("penstock") != "profile":
            raise ProfileError(f"{path} is JSON, but no profile", hint="measure again")
        fields = {name: value for name, value in content.items() if name != "penstock"}
        hint = "delete it; it will be measured again"
        with damage(f"profile {path}", ProfileError, hint=hint):
            return typed_flat(cls, fields, *_INSIDE)
