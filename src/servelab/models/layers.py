"""The other parts of a layer: recurrent state, feed-forward blocks, mixtures of experts.

Models: the matrices, and what a sequence keeps in a layer without keys and values: the last columns
of a short convolution and a matrix that every token rewrites.

Assumes: state has one size whatever the length of the sequence; experts are of one shape.

Ignores: load balancing: which experts a token meets is uniform where a number is expected.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from servelab.models.attention import Attention, CrossAttention, LatentAttention, Linear
from servelab.units import check_count, check_fields, check_flag, size_bytes

AnyAttention = Attention | LatentAttention | CrossAttention


@dataclass(frozen=True)
class RecurrentState:
    """A layer that keeps a fixed state per sequence: Mamba, gated delta rule, linear attention.

    Parameters: ``kind`` its name; ``projections`` its matrices; ``conv_channels``, ``conv_kernel``
    of the short convolution in front, which keeps ``kernel - 1`` columns; ``matrix_elements`` of
    the state proper; ``conv_dtype``, ``matrix_dtype`` in which both are kept;
    ``flop_per_state_element`` of one token's update and read-out; ``extra_params`` of convolution,
    norms, decay rates.

    >>> RecurrentState("mamba", (), 8192, 4, 8192 * 16).state_bytes
    311296
    """

    kind: str
    projections: tuple[Linear, ...]
    conv_channels: int = 0
    conv_kernel: int = 1
    matrix_elements: int = 0
    conv_dtype: str = "bf16"
    matrix_dtype: str = "bf16"
    flop_per_state_element: int = 5
    extra_params: int = 0

    def __post_init__(self) -> None:
        counts = ("conv_channels", "matrix_elements", "flop_per_state_element", "extra_params")
        check_fields(self, *counts, minimum=0)
        check_fields(self, "conv_kernel")
        size_bytes(1, self.conv_dtype), size_bytes(1, self.matrix_dtype)

    @property
    def state_bytes(self) -> int:
        """Return the bytes that one sequence keeps in this layer."""
        columns = self.conv_channels * (self.conv_kernel - 1)
        return size_bytes(columns, self.conv_dtype) + size_bytes(
            self.matrix_elements, self.matrix_dtype
        )

    @property
    def flop_per_token(self) -> int:
        """Return the FLOP of one token outside the matrices: convolution, update and read-out."""
        return (
            2 * self.conv_channels * self.conv_kernel
            + self.flop_per_state_element * self.matrix_elements
        )

    def linears(self, hidden_size: int) -> tuple[Linear, ...]:
        """Return the matrices that every token passes through."""
        return self.projections


@dataclass(frozen=True)
class Mlp:
    """The feed-forward block: three matrices when gated (SwiGLU), two when not.

    Parameters: ``width`` of the hidden layer; ``gated`` whether a gate matrix exists; ``bias``;
    ``extra_params`` that belong to no matrix.

    >>> sum(m.params for m in Mlp(width=14336).linears(4096))
    176160768
    """

    width: int
    gated: bool = True
    bias: bool = False
    extra_params: int = 0

    def __post_init__(self) -> None:
        check_fields(self, "width")
        check_fields(self, "extra_params", minimum=0)
        check_flag("gated", self.gated)
        check_flag("bias", self.bias)

    def linears(self, hidden_size: int) -> tuple[Linear, ...]:
        """Return the matrices: gate and up read one input, so they are one matrix."""
        if self.gated:
            first = Linear("gate_up_proj", hidden_size, 2 * self.width, self.bias)
        else:
            first = Linear("up_proj", hidden_size, self.width, self.bias)
        return (first, Linear("down_proj", self.width, hidden_size, self.bias))


@dataclass(frozen=True)
class Experts:
    """A mixture of experts: a router sends each token to a few of many small MLPs.

    Parameters: ``num_experts`` routed ones; ``experts_per_token``; ``expert`` the shape of one;
    ``shared`` an MLP that every token passes through besides; ``shared_gate`` whether a one-column
    matrix scales it; ``latent_size`` width in which the experts work, between two projections
    (None: the model's); ``router_outputs`` columns of the router (None: one per expert);
    ``extra_params`` of the router: biases, scales.
    Raises: ``ValueError`` where a token would meet more experts than there are.
    Source: Shazeer et al. (2017); shared experts, Dai et al. (2024), "DeepSeekMoE".

    >>> mixtral = Experts(num_experts=8, experts_per_token=2, expert=Mlp(14336))
    >>> mixtral.params_total(4096), mixtral.params_active(4096)
    (1409318912, 352354304)
    """

    num_experts: int
    experts_per_token: int
    expert: Mlp
    shared: Mlp | None = None
    shared_gate: bool = False
    latent_size: int | None = None
    router_outputs: int | None = None
    extra_params: int = 0

    def __post_init__(self) -> None:
        check_fields(self, "num_experts", "experts_per_token")
        check_fields(self, "extra_params", minimum=0)
        check_flag("shared_gate", self.shared_gate)
        for name in ("latent_size", "router_outputs"):
            if getattr(self, name) is not None:
                check_fields(self, name)
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"experts_per_token must be at most num_experts, "
                f"got {self.experts_per_token} and {self.num_experts}"
            )

    def linears(self, hidden_size: int) -> tuple[Linear, ...]:
        """Return the matrices that every token passes through: router, shared expert, latents."""
        found = [Linear("router", hidden_size, self.router_outputs or self.num_experts)]
        if self.latent_size is not None:
            found.append(Linear("latent_down_proj", hidden_size, self.latent_size))
            found.append(Linear("latent_up_proj", self.latent_size, hidden_size))
        if self.shared is not None:
            found += [
                Linear(f"shared_{m.name}", m.d_in, m.d_out, m.bias)
                for m in self.shared.linears(hidden_size)
            ]
            if self.shared_gate:
                found.append(Linear("shared_gate", hidden_size, 1))
        return tuple(found)

    def expert_linears(self, hidden_size: int) -> tuple[Linear, ...]:
        """Return the matrices of one routed expert."""
        return self.expert.linears(self.latent_size or hidden_size)

    def params_per_expert(self, hidden_size: int) -> int:
        """Return the parameters of one routed expert."""
        return sum(m.params for m in self.expert_linears(hidden_size))

    def params_total(self, hidden_size: int) -> int:
        """Return all parameters, every expert's among them."""
        always = sum(m.params for m in self.linears(hidden_size)) + self.extra_params
        return always + self.num_experts * self.params_per_expert(hidden_size)

    def params_active(self, hidden_size: int) -> int:
        """Return the parameters that one token meets."""
        idle = self.num_experts - self.experts_per_token
        return self.params_total(hidden_size) - idle * self.params_per_expert(hidden_size)

    def expected_distinct(self, rows: int) -> float:
        """Return how many experts a step of ``rows`` tokens is expected to touch.

        ``E (1 - (1 - k/E)^rows)``: each token draws its k experts uniformly and independently of
        the others. Real routers prefer some experts and so touch fewer.

        >>> mixtral = Experts(num_experts=8, experts_per_token=2, expert=Mlp(14336))
        >>> [round(mixtral.expected_distinct(rows), 2) for rows in (1, 4, 64)]
        [2.0, 5.47, 8.0]
        """
        rows = check_count("rows", rows)
        if self.experts_per_token == self.num_experts:
            return float(self.num_experts)
        missed = rows * math.log1p(-self.experts_per_token / self.num_experts)
        return -self.num_experts * math.expm1(missed)


@dataclass(frozen=True)
class LayerSpec:
    """One layer: attention or state or both, then a feed-forward block; any may be absent.

    Parameters: ``attention``, ``mlp``, ``state`` its parts (None: the layer has none);
    ``norm_params`` the parameters of the norms around them (``hidden_size`` each for RMSNorm, twice
    that for LayerNorm), and of what else belongs to no matrix; ``extra`` further matrices.

    >>> LayerSpec(Attention(32, 8, 128), Mlp(14336), 2 * 4096).params_total(4096)
    218112000
    """

    attention: AnyAttention | None
    mlp: Mlp | Experts | None
    norm_params: int
    state: RecurrentState | None = None
    extra: tuple[Linear, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self, "norm_params", minimum=0)

    def plain(self) -> tuple[Attention, Mlp]:
        """Return attention and MLP of a layer that has these two and nothing unusual about them.

        Raises: ``ValueError`` for any other layer; the decoders of this package build plain ones.

        >>> LayerSpec(Attention(32, 8, 128), Mlp(14336), 2 * 4096).plain()[1].width
        14336
        """
        heads, mlp = self.attention, self.mlp
        if (
            isinstance(heads, Attention)
            and isinstance(mlp, Mlp)
            and self.state is None
            and not (self.extra or mlp.extra_params)
            and not (heads.chunked or heads.gate_width or heads.shares_kv or heads.extra_params)
            and heads.value_projection
            and heads.value_dim == heads.head_dim
            and heads.top_tokens is None
        ):
            return heads, mlp
        raise ValueError(f"a layer of plain attention and an MLP is needed, got {self}")

    @property
    def kv_elements_per_token(self) -> int:
        """Return the numbers one token adds to this layer's cache."""
        return 0 if self.attention is None else self.attention.kv_elements_per_token

    @property
    def state_bytes(self) -> int:
        """Return the bytes of recurrent state that one sequence keeps in this layer."""
        return 0 if self.state is None else self.state.state_bytes

    def linears(self, hidden_size: int) -> tuple[Linear, ...]:
        """Return the matrices that every token passes through, in order."""
        parts = (self.attention, self.state, self.mlp)
        found = [m for part in parts if part is not None for m in part.linears(hidden_size)]
        return (*found, *self.extra)

    def params_by_part(self, hidden_size: int) -> dict[str, int]:
        """Return the parameters of attention, recurrent state, mlp, and norms."""
        attention, state, mlp = self.attention, self.state, self.mlp
        return {
            "attention": sum(m.params for m in attention.linears(hidden_size)) if attention else 0,
            "recurrent": sum(m.params for m in state.projections) + state.extra_params
            if state
            else 0,
            "mlp": (
                mlp.params_total(hidden_size)
                if isinstance(mlp, Experts)
                else sum(m.params for m in mlp.linears(hidden_size)) + mlp.extra_params
                if mlp
                else 0
            )
            + sum(m.params for m in self.extra),
            "norms": self.norm_params + (attention.norm_params if attention else 0),
        }

    def params_total(self, hidden_size: int) -> int:
        """Return all parameters of the layer."""
        return sum(self.params_by_part(hidden_size).values())

    def params_idle(self, hidden_size: int) -> int:
        """Return the parameters that one token does not meet: the experts it is not sent to."""
        if not isinstance(self.mlp, Experts):
            return 0
        return self.mlp.params_total(hidden_size) - self.mlp.params_active(hidden_size)
