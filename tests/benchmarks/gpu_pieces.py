"""What `python -m book gpu-check` looks at, piece by piece; each gives rows for the table.

A row with `ok` is a check; one without is a measurement. Everything runs on the CPU too, smaller,
so that the pieces are tested where there is no GPU.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "objectives"))

from every_row import TOLERANCES, step

from rlcore.devices import using_precision
from rlcore.evaluation import evaluate
from rlcore.lora import Lora
from rlcore.models import build_model, build_tokenizer
from rlcore.objectives import token_logprobs
from rlcore.preferences import DPO
from rlcore.pretrained import load_pretrained
from rlcore.sampling import response_logits, response_logprobs, sample
from rlcore.tasks import SORT, chat_task, sample_pairs
from rlcore.training import (
    recipe,
    row,
    sft_start,
    train_policy,
    train_preference,
    train_sft,
)

WORDS = "".join(map(chr, range(0x4E00, 0x4E00 + 254)))  # with two more tokens a vocabulary of 256
QUIET = {"seed": 0, "progress": False}
NAMES = {"float32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    piece: str
    what: str
    value: float | str
    unit: str = ""
    wanted: str = ""
    ok: bool | None = None


@dataclass(frozen=True)
class Plan:
    """How large everything is."""

    device: torch.device
    matrix: int = 8192
    sizes: tuple[str, ...] = ("tiny", "small", "medium")
    batch: int = 512
    new_tokens: int = 64
    update: tuple[int, int] = (256, 128)  # rows, tokens
    repeats: int = 5
    compact: tuple[tuple[str, Any], ...] = ()  # changes of the recipe of sort
    evaluate_n: int = 512
    learns: bool = True  # whether the run is long enough to be asked for what it learned
    pretrained: str = "smollm2-135m"
    prompts: int = 8
    group: int = 8
    response: int = 48
    steps: int = 3

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"


def small(device: torch.device) -> Plan:
    """For a processor: the same pieces in a minute or two."""
    few = (("sft_steps", 60), ("steps", 5), ("prompts_per_step", 8), ("size", "nano"))
    return Plan(
        device, matrix=512, sizes=("tiny",), batch=64, new_tokens=16, update=(32, 32), repeats=3,
        compact=few, evaluate_n=64, learns=False, prompts=2, group=4, response=8, steps=1,
    )  # fmt: skip


def toy(device: torch.device) -> Plan:
    """For the tests: seconds."""
    few = (("sft_steps", 2), ("steps", 2), ("prompts_per_step", 4), ("size", "nano"))
    plan = replace(small(device), matrix=64, sizes=("nano",), batch=16, new_tokens=4, repeats=1)
    return replace(plan, compact=few, evaluate_n=8, update=(4, 8), response=4)


def objectives(plan: Plan) -> Iterator[Row]:
    """Advantages, losses, gradients and statistics of every row, beside the CPU's."""
    for dtype, tolerance in TOLERANCES.items():
        ours, theirs = step(str(plan.device), dtype), step("cpu", dtype)
        worst = 0.0
        for name, value in ours.items():
            a, b = value.cpu().double(), theirs[name].double()
            same = (a == b) | (a.isnan() & b.isnan())
            gap = torch.where(same, 0.0, (a - b).abs() / (1 + b.abs()))
            worst = max(worst, float(gap.max()) if gap.numel() else 0.0)
        name = str(dtype).removeprefix("torch.")
        yield _check("every row, from logits to gradient", name, worst, tolerance)


def training_step(plan: Plan) -> Iterator[Row]:
    """One step of SFT and of GRPO, and the sampler, beside the CPU's and transformers'."""
    task = replace(SORT, name="parity", verify=lambda p, text: float(sum(text.encode()) % 2))
    runs: dict[str, Any] = {}
    for device in ("cpu", plan.device):
        model, tokenizer = _compact("tiny", SORT.symbols, device, dtype="float64")
        runs[str(device)] = train_policy(
            model, tokenizer, task, row("grpo"), steps=1, prompts_per_step=8, group_size=8,
            learning_rate=1e-3, **QUIET, device=device,
        ).metrics[0]  # fmt: skip
    ours, theirs = runs[str(plan.device)], runs["cpu"]
    yield _check("GRPO step, gradient norm", "float64", _gap(ours, theirs, "grad_norm"), 1e-4)
    yield _check("GRPO step, reward of the samples", "float64", _gap(ours, theirs, "reward"), 0.0)

    def sft(device: Any, precision: str) -> dict[str, Any]:
        model, tokenizer = _compact("tiny", SORT.symbols, device)
        given = {**QUIET, "device": device, "precision": precision}
        return train_sft(model, tokenizer, SORT, steps=1, **given).metrics[0]

    exact = sft("cpu", "float32")
    for precision, limits in (("float32", (1e-5, 1e-3)), ("bf16", (2e-2, 1e-1))):
        found = sft(plan.device, precision)
        for name, limit in zip(("loss", "grad_norm"), limits, strict=True):
            yield _check(f"SFT step, {name}", precision, _gap(found, exact, name), limit)
    model, tokenizer = _compact("tiny", WORDS, plan.device)
    prompts = [WORDS[i : i + 5 + i % 3] for i in range(8)]
    out = _drawn(model, tokenizer, prompts, 4, 16)
    width = out.response_mask.shape[1]
    with torch.no_grad():
        again = response_logprobs(model, out.input_ids, out.attention_mask, width)
    gap = (again - out.logprobs)[out.response_mask].abs().max()
    yield _check("sampler's log-probs and a forward pass", "float32", float(gap), 1e-4)
    greedy = sample(model, tokenizer, prompts, max_new_tokens=16, greedy=True)
    inputs = tokenizer(prompts, return_tensors="pt", padding=True).to(plan.device)
    inputs.pop("token_type_ids", None)
    theirs = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    start = inputs["input_ids"].shape[1]
    ids = greedy.input_ids[:, -greedy.response_mask.shape[1] :]
    same = all(
        theirs[i, start : start + n].tolist() == ids[i, :n].tolist()
        for i, n in enumerate(greedy.lengths.tolist())
    )
    yield Row("training step", "greedy tokens and generate", "equal" if same else "differ", ok=same)
    if plan.on_gpu:
        graph = sample(model, tokenizer, prompts, max_new_tokens=16, greedy=True, cuda_graph=True)
        same = torch.equal(graph.input_ids, greedy.input_ids)
        said = "equal" if same else "differ"
        yield Row("training step", "greedy tokens with a CUDA graph and without", said, ok=same)


def speed(plan: Plan) -> Iterator[Row]:
    """The rate of matrix products, sampling, and forward and backward pass."""
    rates = {}
    for precision, dtype in NAMES.items():
        a = torch.randn(plan.matrix, plan.matrix, device=plan.device).to(dtype)
        seconds = _best(plan, lambda a=a: a @ a)
        rates[precision] = 2 * plan.matrix**3 / seconds
        name = f"product of {plan.matrix} x {plan.matrix}, {precision}"
        yield Row("speed", name, rates[precision] / 1e12, "TFLOP/s")
    for size in plan.sizes:
        model, tokenizer = _compact(size, WORDS, plan.device)
        if size == plan.sizes[0]:
            yield Row("speed", "attention of the models", model.config._attn_implementation)
        yield from _sampling(plan, size, model, tokenizer)
        yield from _update(plan, size, model, rates)
    yield _memory(plan, "peak memory so far")


def _sampling(plan: Plan, size: str, model: Any, tokenizer: Any) -> Iterator[Row]:
    """Tokens per second; what could take the decoder's place stands beside it."""
    prompts = [WORDS[i : i + 8] for i in range(plan.batch // 8)]
    inputs = tokenizer(prompts * 8, return_tensors="pt").to(plan.device)
    inputs.pop("token_type_ids", None)
    n = plan.new_tokens
    counted = len(prompts) * 8 * n

    def own() -> int:
        return int(_drawn(model, tokenizer, prompts, 8, n).lengths.sum())

    def with_bf16() -> int:
        with using_precision("bf16"):
            return own()

    def recorded() -> int:
        found = _drawn(model, tokenizer, prompts, 8, n, cuda_graph=True)
        return int(found.lengths.sum())

    def recorded_with_bf16() -> int:
        with using_precision("bf16"):
            return recorded()

    def generate(**more: Any) -> int:
        model.generate(
            **inputs, max_new_tokens=n, min_new_tokens=n, do_sample=True, top_k=0, **more
        )
        return counted

    ways: dict[str, Callable[[], int]] = {
        "rlcore, float32": own, "rlcore, bf16": with_bf16, "generate, float32": generate,
    }  # fmt: skip
    if plan.on_gpu:
        ways["rlcore, float32, a CUDA graph"] = recorded
        ways["rlcore, bf16, a CUDA graph"] = recorded_with_bf16
        # transformers compiles the step, with CUDA graphs
        ways["generate, static cache, compiled"] = lambda: generate(cache_implementation="static")
    for name, way in ways.items():
        what = f"sampling, {size}, {plan.batch} x {n}, {name}"
        try:
            drawn = way()
            yield Row("speed", what, drawn / _best(plan, way), "tokens/s")
        except Exception as error:  # a candidate that does not work here is a finding too
            said = f"{type(error).__name__}: {error}".splitlines()[0]
            yield Row("speed", what, said, ok=False if name.startswith("rlcore") else None)


def _update(plan: Plan, size: str, model: Any, rates: dict[str, float]) -> Iterator[Row]:
    """Forward and backward pass, and their share of the rate of matrix products."""
    rows, length = plan.update
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, 256, (rows, length), generator=generator).to(plan.device)
    mask = torch.ones_like(ids)
    config = model.config
    weights = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2)
    attention = config.num_hidden_layers * config.hidden_size * length  # half of the square: causal
    work = 6 * rows * length * (weights + attention)

    def update() -> None:
        logits = response_logits(model, ids, mask, length - 1)
        token_logprobs(logits, ids).sum().backward()
        model.zero_grad(set_to_none=True)

    for precision, rate in rates.items():
        with using_precision(precision):
            seconds = _best(plan, update)
        what = f"forward and backward, {size}, {rows} x {length}, {precision}"
        yield Row("speed", what, rows * length / seconds, "tokens/s")
        yield Row("speed", f"{what}, of the rate", 100 * work / seconds / rate, "%")


def compact_run(plan: Plan) -> Iterator[Row]:
    """SFT, then GRPO on the task sort: held-out accuracy before and after."""
    _reset(plan)
    setup = recipe("sort", **dict(plan.compact))
    began = time.perf_counter()
    model, tokenizer, task, _ = sft_start(setup, **QUIET, device=plan.device)
    middle = time.perf_counter()
    before = evaluate(model, tokenizer, task, n=plan.evaluate_n)
    start = time.perf_counter()
    train_policy(
        model, tokenizer, task, row("grpo"), **setup.policy_settings(), **QUIET, device=plan.device
    )
    end = time.perf_counter()
    after = evaluate(model, tokenizer, task, n=plan.evaluate_n)
    piece = "GRPO run"
    yield Row(piece, f"SFT, {setup.sft_steps} steps", middle - began, "s")
    yield Row(piece, f"GRPO, {setup.steps} steps", end - start, "s")
    for name in ("greedy", "sampled"):
        wanted = "> before" if plan.learns else ""
        ok = after[name] > before[name] if plan.learns else None
        yield Row(piece, f"held-out {name}, before", before[name])
        yield Row(piece, f"held-out {name}, after", after[name], wanted=wanted, ok=ok)
    yield _memory(plan, "peak memory")


def pretrained(plan: Plan) -> Iterator[Row]:
    """A few steps of the pretrained model, where it is present."""
    piece = "pretrained"
    try:
        model, tokenizer = load_pretrained(plan.pretrained, device=plan.device)
    except ValueError as error:
        yield Row(piece, plan.pretrained, str(error).partition(": ")[2])
        return
    count = sum(weight.numel() for weight in model.parameters())
    yield Row(piece, f"{plan.pretrained}, weights", count / 1e6, "million")
    answers = replace(SORT, name="length", verify=lambda p, text: float(len(text) % 2))
    task = chat_task(
        answers, tokenizer, instruction="Write these digits in ascending order: {}",
        max_new_tokens=plan.response,
    )  # fmt: skip
    pairs = sample_pairs(model, tokenizer, task, plan.prompts, prompts_per_batch=8, seed=0)
    del model
    for precision, lora in (("float32", None), ("bf16", None), ("bf16", Lora())):
        _reset(plan)
        way = precision if lora is None else f"{precision}, LoRA"
        model, tokenizer = load_pretrained(plan.pretrained, lora=lora, device=plan.device)
        given = {**QUIET, "device": plan.device, "precision": precision, "micro_batch_size": 16}
        prompts = task.prompts("train", plan.prompts)
        with using_precision(precision):
            began = _now(plan)
            out = _drawn(model, tokenizer, prompts, plan.group, plan.response)
            rate = int(out.lengths.sum()) / (_now(plan) - began)
        yield Row(piece, f"sampling, {len(out)} x {plan.response}, {way}", rate, "tokens/s")
        began = _now(plan)
        run = train_policy(
            model, tokenizer, task, row("grpo", beta=0.04), steps=plan.steps,
            prompts_per_step=plan.prompts, group_size=plan.group, learning_rate=1e-6, **given,
        )  # fmt: skip
        seconds = (_now(plan) - began) / plan.steps
        yield Row(piece, f"GRPO step with a reference, {way}", seconds, "s")
        finite = all(0 < r["grad_norm"] < float("inf") for r in run.metrics if r["rows_used"])
        yield Row(piece, f"GRPO gradients, {way}", "finite" if finite else "not", ok=finite)
        began = _now(plan)
        given |= {"batch_size": len(pairs), "learning_rate": 1e-6}
        dpo = train_preference(model, tokenizer, pairs, DPO, steps=1, **given)
        yield Row(piece, f"DPO step of {len(pairs)} pairs, {way}", _now(plan) - began, "s")
        gap = abs(dpo.metrics[0]["loss"] - 0.693147)
        yield _check("DPO's first loss and log 2", way, gap, 1e-3, piece)
        yield _memory(plan, f"peak memory, {way}", piece)
        del model


PIECES: dict[str, Callable[[Plan], Iterator[Row]]] = {
    "objectives": objectives,
    "training step": training_step,
    "speed": speed,
    "GRPO run": compact_run,
    "pretrained": pretrained,
}


def _compact(size: str, symbols: str, device: Any, dtype: str = "float32") -> tuple[Any, Any]:
    tokenizer = build_tokenizer(symbols)
    model = build_model(size, tokenizer, seed=0, max_length=256, device=device, dtype=dtype)
    return model, tokenizer


def _drawn(model: Any, tokenizer: Any, prompts: list[str], group: int, n: int, **more: Any) -> Any:
    return sample(
        model, tokenizer, prompts, group_size=group, max_new_tokens=n,
        generator=torch.Generator().manual_seed(0), **more,
    )  # fmt: skip


def _gap(ours: dict[str, Any], theirs: dict[str, Any], name: str) -> float:
    return float(abs(ours[name] - theirs[name]) / max(abs(theirs[name]), 1e-12))


def _check(what: str, precision: str, found: float, limit: float, piece: str = "") -> Row:
    piece = piece or ("objectives" if what.startswith("every row") else "training step")
    return Row(piece, f"{what}, {precision}", found, "apart", f"<= {limit:g}", found <= limit)


def _now(plan: Plan) -> float:
    """The time when all that was asked of the device is done."""
    if plan.on_gpu:
        torch.cuda.synchronize(plan.device)
    return time.perf_counter()


def _best(plan: Plan, work: Callable[[], Any]) -> float:
    """Seconds of the fastest of some calls, after one to warm up."""
    work()
    times = []
    for _ in range(plan.repeats):
        began = _now(plan)
        work()
        times.append(_now(plan) - began)
    return min(times)


def _reset(plan: Plan) -> None:
    if plan.on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(plan.device)


def _memory(plan: Plan, what: str, piece: str = "") -> Row:
    """Of the device since the last reset, or of the process since it began."""
    piece = piece or ("speed" if "so far" in what else "GRPO run")
    if plan.on_gpu:
        return Row(piece, what, torch.cuda.max_memory_allocated(plan.device) / 1e9, "GB")
    import resource  # which Windows lacks

    unit = 1e9 if sys.platform == "darwin" else 1e6
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
    return Row(piece, f"{what} (of the process)", used, "GB")
