"""The ``vllm serve`` line that follows from a calculation, each flag with its reason.

Models: parallel sizes, share of the memory, longest request, most sequences, tokens of a step and
format of the cache, as `servelab.memory` and `servelab.roofline` compute them, under vLLM's names.
Most sequences: as many requests of full length as fit, or are served in time. Tokens of a step: as
given; under a target of TTFT the prompt in one step beside the others' decodes, which is what was
priced; under one of TPOT the longest step that meets it, not below the ridge; else vLLM's default.

Assumes: the vLLM whose flags stand in ``data/vllm``; GPUs, for the default of the tokens of a step.

Ignores: flags that change no number here; what activations and graphs take, unless it is given.
"""

import json
import math
import shlex
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from servelab.hardware import Accelerator
from servelab.memory.budget import Budget, budget
from servelab.memory.capacity import Capacity
from servelab.memory.engines import capacity
from servelab.memory.latency import Users, max_users
from servelab.memory.search import largest, max_engine_context
from servelab.memory.vllm import KERNEL_BLOCK
from servelab.models import Attention, ModelSpec
from servelab.roofline.phases import Precision, step_time
from servelab.units import GiB, check_count, format_bytes, format_seconds

#: Our names of number formats where vLLM's differ.
_VLLM_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
#: Tokens of a step by default: (memory of the device from, tokens of ``vllm serve``). An A100 has
#: the smallest whatever its memory. Source: vLLM 0.32.0 ``engine/arg_utils.py``,
#: ``get_batch_defaults``.
_DEFAULT_TOKENS = ((160 * GiB, 16_384), (70 * GiB, 8_192), (0, 2_048))
#: Budgets are multiples of this, as the sizes are that graphs are captured for.
_STEP = 8
#: Rounds in which the tokens of a step and the requests that fit beside them are made to agree.
_MOST_ROUNDS = 8


@dataclass(frozen=True)
class ServeFlag:
    """One flag of the line: ``name``, ``value`` as text, and the ``reason`` for it."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True)
class ServeLine:
    """A ``vllm serve`` line.

    Fields: ``model`` name or folder; ``flags`` in order; ``version`` of the vLLM whose flags they
    are.
    """

    model: str
    flags: tuple[ServeFlag, ...]
    version: str

    def __getitem__(self, name: str) -> str:
        """Return the value of a flag; ``KeyError`` where the line does not have it."""
        return {flag.name: flag.value for flag in self.flags}[name]

    @property
    def arguments(self) -> tuple[str, ...]:
        """Return the words of the line, unquoted, as ``subprocess`` takes them."""
        model = f"./{self.model}" if self.model.startswith("-") else self.model  # else an option
        pairs = (word for flag in self.flags for word in (flag.name, flag.value))
        return ("vllm", "serve", model, *pairs)

    @property
    def command(self) -> str:
        """Return the line for a POSIX shell, one flag on each row."""
        rows = [shlex.join(self.arguments[:3])]
        rows += [shlex.join((flag.name, flag.value)) for flag in self.flags]
        return " \\\n  ".join(rows)


@cache
def vllm_flags() -> Mapping[str, Any]:
    """Return the flags of ``vllm serve`` that were taken from a real vLLM, with its version.

    >>> found = vllm_flags()
    >>> found["version"], "--max-num-seqs" in found["flags"]
    ('0.32.0', True)
    """
    path = resources.files("servelab") / "data/vllm/serve_flags.json"
    known: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return known


def serve_line(
    spec: ModelSpec,
    chip: Accelerator,
    model: str,
    max_model_len: int,
    *,
    utilization: float = 0.9,
    kv_dtype: str | None = None,
    weight_dtype: str | None = None,
    reserve_bytes: int = 0,
    prompt_tokens: int | None = None,
    tpot_seconds: float | None = None,
    ttft_seconds: float | None = None,
    precision: Precision | None = None,
    efficiency: float = 1.0,
    block_size: int | None = None,
    max_num_batched_tokens: int | None = None,
    tp: int = 1,
    pp: int = 1,
    dcp: int = 1,
) -> ServeLine:
    """Return the line that serves as many requests of full length as fit, and are in time.

    Parameters: ``model`` the name or folder to serve; ``kv_dtype`` of the cache, ``weight_dtype``
    of the weights, None for the model's own; ``prompt_tokens`` of a request (None: all but one of
    ``max_model_len``); the others as in ``budget``, ``capacity`` and ``max_users``.
    Raises: ``ValueError`` with value and rule for what vLLM refuses, and where not one request of
    full length fits or is in time.

    >>> from servelab import hardware, models
    >>> qwen, chip = models.get("qwen3-8b"), hardware.get("h100-sxm-80gb")
    >>> line = serve_line(qwen, chip, "Qwen/Qwen3-8B", 8192, tpot_seconds=0.015)
    >>> line["--max-num-seqs"], line["--max-num-batched-tokens"]
    ('28', '296')
    """
    length = check_count("max_model_len", max_model_len)
    _check_length(spec, length)
    _check_block(block_size)
    _check_dcp(spec, dcp)
    weights_name = _weights_name(weight_dtype)
    own = weight_dtype or ("bf16" if spec.weight_dtype == "fp32" else spec.weight_dtype)
    cache_name = _cache_name(kv_dtype, own)
    left = budget(spec, chip, utilization, weight_dtype, reserve_bytes, tp=tp, pp=pp)
    room = max(left.available_bytes, 0)
    if left.available_bytes <= 0:
        beside = f" and the {format_bytes(reserve_bytes)} set aside" if reserve_bytes else ""
        raise ValueError(
            f"weights of {format_bytes(left.weight_bytes)} a rank{beside} leave nothing of the "
            f"{format_bytes(left.usable_bytes)} that --gpu-memory-utilization {utilization:g} "
            "allows: vLLM does not start without a cache"
        )
    settings: dict[str, Any] = {
        "block_size": block_size,
        "kv_dtype": kv_dtype or own,
        "engine": "vllm",
        "tp": tp,
        "pp": pp,
        "dcp": dcp,
    }
    prompt = length - 1 if prompt_tokens is None else prompt_tokens
    if precision is None and (tpot_seconds is not None or ttft_seconds is not None):
        precision = Precision(kv=kv_dtype or own)
    targets = tpot_seconds, ttft_seconds, precision, efficiency

    def fitting(tokens: int | None) -> tuple[Capacity, Users]:
        told = settings | {"max_num_batched_tokens": tokens}
        fits = capacity(spec, room, length, **told)
        if not fits.sequences:
            longest = max_engine_context(spec, room, 1, length, **told)
            raise ValueError(
                f"a request of {length:,} tokens needs {format_bytes(fits.needed_bytes)} of cache "
                f"and {format_bytes(room)} are left: vLLM does not start with less than one "
                f"(at most {longest or 0:,} tokens fit)"
            )
        if tpot_seconds is None and ttft_seconds is None:
            none = {"capacity": fits.sequences}
            return fits, Users(fits.sequences, "memory", "capacity", none)
        found = max_users(spec, chip, room, prompt, length - prompt, *targets, **told)
        if not found.users:
            missed = tpot_seconds if found.target == "tpot" else ttft_seconds
            raise ValueError(
                f"not one request of {length:,} tokens meets a {found.target.upper()} of "
                f"{format_seconds(missed or 0)}: the bound of a single one is longer"
            )
        return fits, found

    fits, found = fitting(max_num_batched_tokens)
    tokens, why = max_num_batched_tokens, "as given"
    for _ in range(_MOST_ROUNDS if tokens is None else 0):
        # a window is held beside the tokens of a step, so that these decide who fits
        tokens, why = _step_tokens(
            spec, chip, found.users, length, prompt, *targets, tp, pp, left.device_bytes
        )
        before, (fits, found) = found, fitting(tokens)
        if before.users == found.users:
            break
    assert tokens is not None  # there is at least one round
    flags = [
        ServeFlag("--tensor-parallel-size", str(tp), _parallel_reason(left, tp, pp)),
        ServeFlag("--pipeline-parallel-size", str(pp), _pipeline_reason(spec, pp)),
        ServeFlag("--gpu-memory-utilization", f"{utilization:g}", _memory_reason(left)),
        ServeFlag("--max-model-len", str(length), _length_reason(spec, length, fits)),
        _sequences(found, fits, tokens),
        ServeFlag("--max-num-batched-tokens", str(tokens), why),
        ServeFlag("--kv-cache-dtype", cache_name, _cache_reason(kv_dtype or own, fits)),
    ]
    if weights_name is not None:
        flags.append(ServeFlag("--dtype", weights_name, "weights and activations, as given"))
    if block_size is not None:
        reason = f"as given; a request of full length takes {fits.blocks_per_sequence:,} blocks"
        flags.append(ServeFlag("--block-size", str(block_size), reason))
    if dcp > 1:
        reason = f"{dcp} ranks that hold the same KV heads share the tokens of a request"
        flags.append(ServeFlag("--decode-context-parallel-size", str(dcp), reason))
    return ServeLine(model, tuple(flags), str(vllm_flags()["version"]))


# --- what vLLM refuses --------------------------------------------------------------------------


def _check_length(spec: ModelSpec, length: int) -> None:
    longest = spec.max_context_tokens
    if longest is not None and length > longest:
        raise ValueError(
            f"--max-model-len {length:,} is longer than the {longest:,} tokens that the model's "
            "configuration allows: vLLM refuses it"
        )


def _check_block(block_size: int | None) -> None:
    if block_size is not None and check_count("block_size", block_size) % KERNEL_BLOCK:
        raise ValueError(
            f"--block-size {block_size} is no multiple of {KERNEL_BLOCK}, and vLLM's kernels take "
            "no other"
        )


def _check_dcp(spec: ModelSpec, dcp: int) -> None:
    """Refuse what ``verify_with_parallel_config`` of vLLM 0.32.0 refuses beside ``capacity``."""
    for layer in spec.layer_counts:
        heads = layer.attention
        if isinstance(heads, Attention):
            group = heads.num_q_heads // heads.num_kv_heads
            if group % check_count("dcp", dcp):
                raise ValueError(
                    f"--decode-context-parallel-size {dcp} does not divide the {group} query "
                    "heads per KV head"
                )


def _cache_name(kv_dtype: str | None, own: str) -> str:
    """Return vLLM's name of a format of the cache; auto is the format that the model runs in."""
    if kv_dtype is None or kv_dtype == own:
        return "auto"
    name = _VLLM_NAMES.get(kv_dtype, kv_dtype)
    known = vllm_flags()["flags"]["--kv-cache-dtype"]["choices"]
    if name not in known:
        raise ValueError(
            f"vLLM {vllm_flags()['version']} has no cache in {kv_dtype}; it has {', '.join(known)}"
        )
    return name


def _weights_name(weight_dtype: str | None) -> str | None:
    """Return vLLM's name of a format of weights; what is quantised is so in the checkpoint."""
    if weight_dtype is None:
        return None
    if weight_dtype not in _VLLM_NAMES:
        raise ValueError(
            f"vLLM takes quantised weights as the checkpoint has them: give the configuration of "
            f"one in {weight_dtype} instead of --weight-dtype {weight_dtype}"
        )
    return _VLLM_NAMES[weight_dtype]


# --- what follows from the numbers --------------------------------------------------------------


def _step_tokens(
    spec: ModelSpec,
    chip: Accelerator,
    users: int,
    length: int,
    prompt: int,
    tpot: float | None,
    ttft: float | None,
    formats: Precision | None,
    efficiency: float,
    tp: int,
    pp: int,
    device_bytes: int,
) -> tuple[int, str]:
    """Return the tokens of a step, and why."""
    if ttft is None and tpot is None:
        return _default_tokens(chip, device_bytes), "vLLM's default for this chip, made explicit"

    def seconds(chunk: int) -> float:
        step = [*[(1, length - 1)] * users, (chunk, max(length - chunk, 0))]
        return step_time(spec, step, chip, formats, tp, pp).seconds

    if ttft is not None:
        tokens = _rounded_up(prompt + users - 1)
        return tokens, (
            f"a prompt of {prompt:,} tokens in one step beside {users - 1:,} decodes, as the TTFT "
            f"of {format_seconds(ttft)} was counted"
        )
    assert tpot is not None
    assert formats is not None  # there is a target
    in_time = largest(lambda n: n < 1 or seconds(n) <= tpot * efficiency, length) or 0
    ridge = _rounded_up(math.ceil(chip.ridge(formats.compute) * formats.bits_per_weight / 16))
    tokens = max((users + in_time) // _STEP * _STEP, ridge, _rounded_up(users + 1))
    slowest = format_seconds(seconds(tokens - users) / efficiency)
    if tokens <= users + in_time:
        return tokens, f"the most whose step ({slowest} with {users:,} decodes) meets the TPOT"
    return tokens, (
        f"the ridge of the chip, below which a prompt only takes longer; a step with a prompt in "
        f"it takes {slowest}"
    )


def _default_tokens(chip: Accelerator, device_bytes: int) -> int:
    a100 = "a100" in chip.name.lower()
    return next(
        tokens
        for memory, tokens in _DEFAULT_TOKENS
        if device_bytes >= memory and not (a100 and 0 < memory < 160 * GiB)
    )


def _rounded_up(tokens: int) -> int:
    return -(-tokens // _STEP) * _STEP


def _sequences(found: Users, fits: Capacity, tokens: int) -> ServeFlag:
    """Return the most sequences; vLLM takes no more of them than tokens in a step."""
    reasons = [f"{fits.sequences:,} requests of full length fit"]
    reasons += [
        f"{target.upper()} allows " + (f"{users:,}" if users < fits.sequences else "all of them")
        for target, users in found.by_target.items()  # no more than fit were asked for
        if target != "capacity"
    ]
    if tokens < found.users:
        reasons.append(f"vLLM takes no more than the {tokens:,} tokens of a step")
    elif found.target == "capacity":
        reasons.append("more of shorter ones would, at the risk of pre-emption")
    return ServeFlag("--max-num-seqs", str(min(found.users, tokens)), "; ".join(reasons))


def _parallel_reason(left: Budget, tp: int, pp: int) -> str:
    where = f"on each of {tp * pp} ranks" if tp * pp > 1 else "on one rank"
    return f"{format_bytes(left.weight_bytes)} of weights {where}"


def _pipeline_reason(spec: ModelSpec, pp: int) -> str:
    layers = len(spec.layers)
    return f"{layers} layers in {pp} stages" if pp > 1 else f"all {layers} layers on each rank"


def _memory_reason(left: Budget) -> str:
    taken = f"{format_bytes(left.usable_bytes)} of {format_bytes(left.device_bytes)}"
    rest = f"{format_bytes(left.available_bytes)} left for the cache"
    if left.reserve_bytes:
        return f"{taken}; {rest} beside {format_bytes(left.reserve_bytes)} set aside"
    return f"{taken}; {rest}, less what vLLM finds that activations and graphs take"


def _length_reason(spec: ModelSpec, length: int, fits: Capacity) -> str:
    longest = spec.max_context_tokens
    of = "" if longest is None else f", of {longest:,} that the model allows"
    return f"prompt and answer{of}; {format_bytes(fits.needed_bytes)} of cache a rank"


def _cache_reason(kv_dtype: str, fits: Capacity) -> str:
    per_token = fits.needed_bytes / fits.max_model_len
    return f"cache in {kv_dtype}: {format_bytes(per_token)} a token of a full request, on a rank"


def script(line: ServeLine, title: str) -> Iterator[str]:
    """Yield the rows of a shell script: a title, a comment for each flag, the line.

    >>> flag = ServeFlag("--max-num-seqs", "4", "4 fit")
    >>> print("\\n".join(script(ServeLine("my model", (flag,), "0.32.0"), "for four")))
    # for four; flags of vLLM 0.32.0
    # --max-num-seqs 4: 4 fit
    vllm serve 'my model' \\
      --max-num-seqs 4
    """
    for remark in (
        f"{title}; flags of vLLM {line.version}",
        *(f"{flag.name} {flag.value}: {flag.reason}" for flag in line.flags),
    ):
        yield textwrap.fill(
            remark,
            80,
            initial_indent="# ",
            subsequent_indent="#   ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    yield line.command
