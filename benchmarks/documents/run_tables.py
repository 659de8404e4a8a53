# SPDX-License-Identifier: Apache-2.0
"""Tables of what runs gave and took: accuracy, time, memory, tokens."""

from ..records import interval, records, table


def quantize_cpu() -> str:
    found = records("quantize_cpu")
    sizes = sorted({record["shape"][0] for record in found})
    rows: dict[tuple[str, str], list[str]] = {}
    for record in found:
        key = tuple(record["name"].split(" / "))
        rows.setdefault(key, [*key]).append(f"{record['value']:.3g} ({record['ratio']:.2f})")
    return table(["operation", "contender", *(f"{size}²: GB/s (time / ours)" for size in sizes)], list(rows.values()))


def demo(name: str = "demo_cpu") -> str:
    rows = []
    for r in records(name):
        before, after = r["standard_error"]
        rows.append(
            [r["name"][-1], f"{r['baseline']:.3f} ± {before:.3f}", f"{r['value']:.3f} ± {after:.3f}"]
            + [f"{r['value'] - r['baseline']:+.3f}"]
        )
    return table(["seed", "before RL", "after RL", "gain"], rows)


def lora() -> str:
    return demo("lora_cpu")


def moe() -> str:
    lines = demo("moe_cpu").splitlines()
    agreements = ["router agreement", "---", *(f"{r['router_agreement']:.3f}" for r in records("moe_cpu"))]
    return "".join(f"{line} {value} |\n" for line, value in zip(lines, agreements, strict=True))


def vllm_agreement() -> str:
    rows = []
    for r in records("vllm_agreement"):
        cells = [f"{r[key][part]:.1e}" for key in ("vllm", "last_bits") for part in ("median", "max")]
        shares = [f"{100 * r[key]['beyond_1e-3']:.1f}" for key in ("vllm", "last_bits")]
        rows.append([r["scheme"], *cells[:2], shares[0], *cells[2:], shares[1], f"{r['quantization']['median']:.2f}"])
    columns = ["scheme", "vLLM: median", "max", "beyond 1e-3, %", "last bits: median", "max", "beyond 1e-3, %"]
    return table([*columns, "quantization, median"], rows)


def export_perplexity() -> str:
    rows = []
    for r in records("export_perplexity"):
        sqnr, packed = r["weight_sqnr_db"], r["nats_to_packed"]
        nats = "" if r["ratio"] == 1 else f"{r['nats_to_bf16']:+.3f} ± {r['standard_error']:.3f}"
        rows.append([r["name"], f"{r['value']:.2f}", nats])
        rows[-1] += ["" if packed is None else f"{packed:+.4f}", "" if sqnr is None else f"{sqnr:.2f}"]
    columns = ["weights", "perplexity", "nats per token to bfloat16", 'to `mode="packed"`, same rule']
    return table([*columns, "SQNR, dB"], rows)


def scheme_perplexity() -> str:
    rows = []
    for r in records("scheme_perplexity"):
        if r["unit"] != "perplexity":
            continue
        name = f"`{r['name']}`{' *' if r['on_front'] else ''}"
        if r["bits"] is None:
            rows.append(["bfloat16", "16", f"{r['value']:.2f}", "", "", "", ""])
            continue
        rows.append(
            [name, f"{r['bits']:.2f}", f"{r['value']:.2f}", f"{r['nats_to_bf16']:+.3f} ± {r['standard_error']:.3f}"]
        )
        rows[-1] += [f"{r['kl']:.3f} ± {r['kl_standard_error']:.3f}", f"{100 * r['same_top']:.1f}"]
        rows[-1].append(f"{r['weight_sqnr_db']:.2f}")
    columns = ["scheme", "bits", "perplexity", "nats per token to bfloat16", "KL, nats", "same likeliest token, %"]
    return table([*columns, "weight SQNR, dB"], rows)


def scheme_perplexity_time() -> str:
    found = {r["name"]: r for r in records("scheme_perplexity")}
    time = found["time in full precision"]
    memory = [f"{found[f'memory of {way}']['value']:,.0f}" for way in ("plain loop", "full precision", "one scheme")]
    rows = [
        ["plain loop, `model(ids, labels=ids).loss`", f"{time['baseline']:.2f}", "1", memory[0]],
        ["`hf-mxfp4 eval`, full precision", f"{time['value']:.2f}", f"{time['ratio']:.2f}", memory[1]],
        ["`hf-mxfp4 eval`, full precision and `w4a16:rceil`", "", "", memory[2]],
    ]
    return table(["way", "processor seconds, 8 problems", "of the plain loop", "growth on windows of 2,048, MB"], rows)


def gguf_perplexity() -> str:
    rows = [
        [r["name"], f"{r['bits_per_weight']:.4g}", f"{r['value']:.2f}", f"{r['ratio']:.3f}"]
        + [f"{r['nats_to_bf16']:+.3f} ± {r['standard_error']:.3f}", f"{r['divergence']:.3f}"]
        + [f"{r['same_top_percent']:.1f}"]
        for r in records("gguf_perplexity")
    ]
    baseline = records("gguf_perplexity")[0]
    rows.insert(0, ["BF16", "16", f"{baseline['baseline']:.2f}", "1", "", "", ""])
    columns = ["file", "bits per weight of the layers", "perplexity", "over BF16", "nats per token to BF16"]
    return table([*columns, "divergence, nats", "same likeliest token, %"], rows)


def smoothing() -> str:
    """A row for each scheme, and what it loses by strength."""
    found: dict[str, dict[object, dict]] = {}
    for r in records("smoothing"):
        found.setdefault(r["name"], {})[r["strength"]] = r
    strengths = list(dict.fromkeys(strength for row in found.values() for strength in row))
    rows = [
        [name, f"{next(iter(row.values()))['bits']:.4g}"]
        + [f"{r['kl']:.3f} ± {r['kl_standard_error']:.3f} ({r['value']:.2f})" for r in (row[s] for s in strengths)]
        for name, row in found.items()
    ]
    columns = [f"strength {s}" if isinstance(s, float) else "as it is" for s in strengths]
    one = records("smoothing")[0]
    what = f"KL in nats per token ± standard error (perplexity; {one['baseline']:.2f} in bfloat16), {one['model']}."
    return f"{table(['scheme', 'bits of an operand', *columns], rows)}\n{what}\n"


def layer_host_cost() -> str:
    found = records("layer_host_cost")
    rows = []
    for r in found:
        over = [f"{r[f'{prefix}value']:.1f} ({r[f'{prefix}over']:+.1f})" for prefix in ("", "grad_")]
        rows.append([r["name"], *over, str(r["calls"])])
    columns = ["layer", "no gradient: us (over nn.Linear)", "with gradients", "Python calls"]
    return f"{table(columns, rows)}\n{found[0]['hardware']}, {found[0]['date']}\n"


def memory_runs() -> list[tuple[str, str, dict]]:
    """Mode, whether gradients are checkpointed, and the record."""
    found = [(r["name"].split(" / checkpointing "), r) for r in records("memory") if "measured" in r]
    return [(mode, checkpointing, r) for (mode, checkpointing), r in found]


def memory() -> str:
    parts = ("weights", "gradients", "optimizer", "saved", "peak", "process")
    rows = [
        [mode, checkpointing, *(f"{r['measured'][part] / 1e6:.0f}" for part in parts)]
        for mode, checkpointing, r in memory_runs()
    ]
    return table(["mode", "checkpointing", *parts], rows)


def saved_error() -> str:
    prefix = "gradient error / "
    found = [r for r in records("memory") if r["name"].startswith(prefix)]
    return table(["mode", "difference"], [[r["name"].removeprefix(prefix), f"{r['value']:.4f}"] for r in found])


def pretrain() -> str:
    rows = []
    for r in records("pretrain"):
        if r["name"] == "baseline":
            continue
        overhead, versus = r["overhead"], r.get("versus", {}).get("gap")
        reached = f"{overhead['n_finite']} of {overhead['n']}"
        found = f"over {100 * r['value']:.0f}" if r["unit"].endswith("at least") and overhead["at_least"] else None
        rows.append(
            [f"`{r['name']}`", str(sum(count > 0 for count in r["quantized_operands"].values()))]
            + [found or interval(overhead, 100, 1), reached, interval(r["gap"], 1, 4)]
            + [interval(versus, 1, 4) if versus else "", r["paper"] or ""]
        )
    columns = ["arm", "quantized operands", "more tokens, %", "seeds that got there", "loss above the baseline's"]
    return table([*columns, "loss above that of `all`", "paper: more tokens"], rows)


def soak() -> str:
    rows = []
    for r in records("soak_cpu"):
        low, high = r["interval_95"]
        (first, start), (last, end) = r["resident_mib"][0], r["resident_mib"][-1]
        spread = [f"{value:.3f}" for value in r["measured_over_intended_std"]]
        rows.append(
            [r["name"].removeprefix("soak_"), r["shape"].split(",")[0], f"{r['value']:+.2f} [{low:+.2f}, {high:+.2f}]"]
            + [f"{start:.1f} at {first}, {end:.1f} at {last}", f"{r['tensors_alive'][-1][1]}"]
            + [f"{len(r['traces_of_noise'])} of {r['rollouts_compared']}", " / ".join(spread)]
            + [f"{len(r['not_finite'])} of {r['logged_numbers']}"]
        )
    columns = [
        "run",
        "length",
        "KiB per step [95 %]",
        "resident MiB at step",
        "tensors alive",
        "rollouts that left a trace",
    ]
    return table([*columns, "measured / intended sigma, least / mean / most", "logged numbers not finite"], rows)
