"""Transformer: the sizes of a model, and from them its weight matrices and its parameters."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple, TypeAlias

from penstock.errors import EstimateError

Scores: TypeAlias = Literal[
    "fused", "masked", "flash 1", "flash 3", "written", "eager", "eager in 32 bits"
]
Split: TypeAlias = Literal["tensor", "copied", "expert"]


class Matrix(NamedTuple):
    """A weight matrix: cut over the tensor ranks, copied on each, or one per expert.

    parts:  matrices that it is in models whose operators are kernels of their own.
    """

    inputs: int
    outputs: int
    split: Split
    parts: int = 1


@dataclass(frozen=True, slots=True)
class Latent:
    """Attention whose queries, keys and values pass through small matrices (DeepSeek's MLA)."""

    query_rank: int
    key_rank: int
    rotary: int  # numbers of a head that carry the position, in query and key


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of a block: how many, how many see a token, their width, the shared width."""

    count: int
    chosen: int
    width: int
    shared_width: int
    dense_blocks: int  # so many first blocks have a plain feed-forward instead


@dataclass(frozen=True, slots=True)
class Transformer:
    """The sizes of a decoder.

    positions    rows of a learned embedding of positions, 0 for rotary ones
    scores       how attention is computed: fused (scores never written; only of pairs that may
                 see each other), masked (so, of all pairs: their mask is a tensor), written by
                 products with a fused softmax between them, or eager (an operator at a time),
                 in 16 bits or, where a model asks for it, in 32
    is_op_by_op  each operator between the products is a kernel of its own
    Raises:   EstimateError: a size is below 1, or heads do not divide.
    """

    hidden: int
    blocks: int
    heads: int
    vocabulary: int
    sequence: int
    feed_forward: int
    key_heads: int = 0  # 0: as many as heads
    head_size: int = 0  # 0: hidden / heads
    gated: bool = False
    tied: bool = True
    positions: int = 0
    scores: Scores = "fused"
    gate_bytes: int = 0  # of a number of the feed-forward, read and written; 0: of one kernel
    is_op_by_op: bool = False
    latent: Latent | None = None
    experts: Experts | None = None

    def __post_init__(self) -> None:
        for field in fields(self)[:6]:
            if getattr(self, field.name) < 1:
                message = f"a model with {field.name} {getattr(self, field.name)}"
                raise EstimateError(message, hint=f"{field.name} must be 1 or more")
        if not self.head_size and self.hidden % self.heads:
            message = f"hidden size {self.hidden} is not divisible by {self.heads} heads"
            raise EstimateError(message, hint="check hidden size and heads")

    @property
    def gate_traffic(self) -> int:
        """Return the bytes of a number of the feed-forward that its gate or GELU moves, forward."""
        return self.gate_bytes or (6 if self.gated else 4)

    @property
    def is_flash(self) -> bool:
        """Return whether scores are never written."""
        return self.scores in ("fused", "masked", "flash 1", "flash 3")

    @property
    def per_head(self) -> int:
        """Return the numbers of one head, without those of the position."""
        return self.head_size or self.hidden // self.heads

    @property
    def head_matrix(self) -> int:
        """Return the numbers of the matrix from hidden to vocabulary."""
        return self.hidden * self.vocabulary

    @property
    def largest_matrix(self) -> int:
        """Return the numbers of the largest matrix that is cut over the tensor ranks."""
        own = (m for m in (*self.attention(), *self.plain()) if m.split == "tensor")
        return max(m.inputs * m.outputs for m in own)

    def attention(self) -> Iterator[Matrix]:
        """Yield the matrices of the attention of a block."""
        wide = self.heads * self.per_head
        if self.latent is None:
            keys = (self.key_heads or self.heads) * self.per_head
            yield Matrix(self.hidden, wide + 2 * keys, "tensor", 3 if self.gated else 1)
        else:
            inner, cached = self.latent.query_rank, self.latent.key_rank
            yield Matrix(self.hidden, inner, "copied")
            yield Matrix(inner, wide + self.heads * self.latent.rotary, "tensor")
            yield Matrix(self.hidden, cached + self.latent.rotary, "copied")
            yield Matrix(cached, 2 * wide, "tensor")
        yield Matrix(wide, self.hidden, "tensor")

    def plain(self) -> Iterator[Matrix]:
        """Yield the matrices of a plain feed-forward."""
        yield Matrix(self.hidden, self.feed_forward * (1 + self.gated), "tensor", 1 + self.gated)
        yield Matrix(self.feed_forward, self.hidden, "tensor")

    def mixture(self) -> Iterator[Matrix]:
        """Yield the matrices of a feed-forward of experts; those of one expert stand for all."""
        if self.experts is not None:
            yield Matrix(self.hidden, self.experts.count, "copied")
            yield Matrix(self.hidden, self.experts.width * (1 + self.gated), "expert")
            yield Matrix(self.experts.width, self.hidden, "expert")
            if self.experts.shared_width:
                yield Matrix(self.hidden, self.experts.shared_width * (1 + self.gated), "tensor")
                yield Matrix(self.experts.shared_width, self.hidden, "tensor")

    def block(self, at: int) -> tuple[Matrix, ...]:
        """Return the matrices of block `at`, counted from the input."""
        mixed = self.experts is not None and at >= self.experts.dense_blocks
        return (*self.attention(), *(self.mixture() if mixed else self.plain()))

    @property
    def flop_per_token(self) -> float:
        """Return the FLOP of the products of a token, forward and backward, without attention."""
        chosen = self.experts.chosen if self.experts else 1
        numbers = self.head_matrix
        for at in range(self.blocks):
            for matrix in self.block(at):
                copies = chosen if matrix.split == "expert" else 1
                numbers += matrix.inputs * matrix.outputs * copies
        return 6.0 * numbers

    @property
    def parameters(self) -> int:
        """Return the numbers that are trained.

        Ignores:  biases and the weights of norms, below 0.1 % of any model here.
        """
        count = self.experts.count if self.experts else 1
        total = (2 - self.tied) * self.head_matrix + self.positions * self.hidden
        for at in range(self.blocks):
            for matrix in self.block(at):
                copies = count if matrix.split == "expert" else 1
                total += matrix.inputs * matrix.outputs * copies
        return total


def gpt(hidden: int, blocks: int, heads: int, *, sequence: int, vocabulary: int) -> Transformer:
    """Return a GPT-2-like decoder: feed-forward of 4 * hidden, tied, scores written."""
    return Transformer(
        hidden, blocks, heads, vocabulary, sequence, 4 * hidden,
        positions=sequence, scores="written",
    )  # fmt: skip
