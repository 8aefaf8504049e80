"""Multi-head latent attention as data."""

from dataclasses import dataclass
from typing import ClassVar

from nightmill.worker.model.rope import Rope
from nightmill.worker.model.weights import Norm, Role, Weights, stack

__all__ = ["LatentAttention"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Causal self-attention whose keys and values are made of one latent vector (arXiv:2405.04434, 2.1).

    A token keeps c, `latent` elements, normed, and r, rotated by its position; both serve all heads. Head h
    has the key [K_h c, r] and the value V_h c; its query is [q_h, a rotated part]. As q_h K_h c is
    (K_h^T q_h) c, keys and values are never made: queries go to the latent's size, and of the sum of c over
    tokens V_h makes that of values (MLA, absorbed).
    """

    heads: int
    key_dim: int  # of a head's query and key, without the rotated part
    value_dim: int
    latent: int
    rope: Rope  # of `rope.dim` elements, which come last
    norm: Norm  # of the latent, and of the queries' own
    query_latent: int | None = None  # queries are made of so many normed elements; None: of the input
    fused: bool = False  # the file has keys and values of the latent in one tensor
    scale: float  # of scores

    title: ClassVar = "multi-head latent attention"
    kv_heads: ClassVar = 1  # what is kept serves all heads

    @property
    def kept(self) -> int:
        """Elements of a token that are kept."""
        return self.latent + self.rope.dim

    @property
    def keys(self) -> int:
        """Half of the elements that are kept, as those who plan memory count keys and as many values."""
        return -(-self.kept // 2)

    @property
    def head_dim(self) -> int:
        """Elements of a head's query."""
        return self.key_dim + self.rope.dim

    def weights(self, width: int) -> Weights:
        """Its weights in a block of the file, for a residual stream of `width` elements."""
        queries = self.heads * self.head_dim
        weights: Weights = {}
        if self.query_latent is None:
            weights[Role.Q_UP] = stack({"attn_q.weight": (queries, width)})
        else:
            weights[Role.Q_DOWN] = stack({"attn_q_a.weight": (self.query_latent, width)})
            weights |= self.norm.weights(Role.Q_DOWN_NORM, "attn_q_a_norm", self.query_latent)
            weights[Role.Q_UP] = stack({"attn_q_b.weight": (queries, self.query_latent)})
        weights[Role.KV_DOWN] = stack({"attn_kv_a_mqa.weight": (self.kept, width)})
        weights |= self.norm.weights(Role.KV_DOWN_NORM, "attn_kv_a_norm", self.latent)
        if self.fused:
            rows = self.heads * (self.key_dim + self.value_dim)
            weights[Role.KV_UP] = stack({"attn_kv_b.weight": (rows, self.latent)}, product=False)
        else:
            weights[Role.K_UP] = stack({"attn_k_b.weight": (self.heads, self.latent, self.key_dim)})
            weights[Role.V_UP] = stack({"attn_v_b.weight": (self.heads, self.value_dim, self.latent)})
        weights[Role.ATTN_OUTPUT] = stack({"attn_output.weight": (width, self.heads * self.value_dim)})
        return weights
