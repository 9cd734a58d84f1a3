"""Kinds: one profile for every kind of device of a cluster, and their file."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeAlias

from penstock.cluster.cluster import Cluster
from penstock.errors import ProfileError
from penstock.files import read_json, write_text
from penstock.profile.profile import Profile

Profiles: TypeAlias = Profile | Sequence[Profile]


def as_tuple(profiles: Profiles) -> tuple[Profile, ...]:
    """Return one profile, or several, as a tuple.

    Raises:   ProfileError: none; two of one kind; several, and one of them of any kind.
    """
    row = (profiles,) if isinstance(profiles, Profile) else tuple(profiles)
    kinds = [profile.kind for profile in row]
    if not row:
        raise ProfileError("no profile", hint="measure the graph, or estimate it")
    if len(set(kinds)) < len(kinds) or (len(kinds) > 1 and "" in kinds):
        hint = "give one profile for each kind of device"
        raise ProfileError(f"profiles of {', '.join(map(repr, kinds))}", hint=hint)
    return row


def place_of(profiles: Sequence[Profile], kind: str) -> int:
    """Return the place of the profile of a device kind among `profiles`.

    Raises:   ProfileError: there is none.
    """
    for at, profile in enumerate(profiles):
        if profile.kind in ("", kind):
            return at
    there = ", ".join(profile.kind for profile in profiles)
    message = f'no profile is of device "{kind}"; there are profiles of {there}'
    raise ProfileError(message, hint="estimate the graph for this cluster, or measure it there")


def places_of(profiles: Sequence[Profile], cluster: Cluster, num_ranks: int) -> tuple[int, ...]:
    """Return for each of the first ranks of `cluster` the place of its device's profile.

    Raises:   ProfileError: a device without one.  ClusterError: too few ranks.
    """
    kinds = [cluster.device_of(rank).name for rank in range(num_ranks)]
    known = {kind: place_of(profiles, kind) for kind in dict.fromkeys(kinds)}
    return tuple(known[kind] for kind in kinds)


def save_profiles(profiles: Iterable[Profile], path: Path | str) -> None:
    """Write profiles as JSON; a single one as `Profile.save` does."""
    row = list(profiles)
    if len(row) == 1:
        row[0].save(path)
        return
    content = {"penstock": "profiles", "profiles": [profile.to_json() for profile in row]}
    write_text(path, json.dumps(content))


def load_profiles(path: Path | str) -> tuple[Profile, ...]:
    """Read what `save_profiles` or `Profile.save` wrote.

    Raises:   ProfileError: missing, damaged or not a profile.
    """
    content = read_json(path, ProfileError, "profile")
    if content.get("penstock") != "profiles":
        return (Profile.load(path),)
    rows = content.get("profiles")
    if not isinstance(rows, list):
        raise ProfileError(f"{path} holds no list of profiles", hint="make the plan again")
    found = tuple(Profile.from_json(row, path) for row in rows)
    return as_tuple(found)
