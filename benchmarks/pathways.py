# SPDX-License-Identifier: Apache-2.0
"""What each error component does by itself to a small trained model; writes `benchmarks/results/pathways.json`.

    python -m benchmarks.pathways

Rollouts and temperature: three seeds of the demo's model (4 layers, "a+b=", warmed up to a loss of 0.2) on 500 held-out
problems each, W4A4: every component on weights and activations, against the same model in full precision. Gradients: a
12-layer model of the same kind on 64 problems, once with the whole of training's passes changed and once with the way
back alone, beside the sqrt(L/12) of arXiv 2605.20402. About six minutes on one core.
"""

import argparse
import platform
from statistics import fmean

import torch
from transformers import PreTrainedModel

from hf_mxfp4.analysis.policy.gradient_gain import GradientGain, gradient_gain
from hf_mxfp4.analysis.policy.injection import inject_component
from hf_mxfp4.analysis.policy.pathways import ComponentDamage, component_damage
from hf_mxfp4.analysis.policy.predictions import IGNORED, evaluation_mode, policy_logits
from hf_mxfp4.analysis.policy.temperature import EffectiveTemperature, effective_temperature
from hf_mxfp4.numerics import COMPONENTS, QuantScheme
from recipes.evaluation.generate import evaluate_greedy
from recipes.tasks import Task, load_task
from recipes.tasks.arithmetic import ALPHABET
from recipes.tasks.tiny_model import build_char_tokenizer, encode_example

from .records import RESULTS, made, table, write
from .scheme_error import train


COMMAND = "python -m benchmarks.pathways"
SCHEMES = (
    QuantScheme(),
    QuantScheme("rceil", 128, "static"),
    QuantScheme("rceil", 128, "static", 0.5),
    QuantScheme("even", 128, "blockwise"),
)
INJECTED = (*COMPONENTS, "all")
SEEDS = (0, 1, 2)
GRADIENT_LAYERS, GRADIENT_PROBLEMS = 12, 64
PACKAGES = ("torch", "transformers")


def sequences(task: Task, count: int) -> dict[str, torch.Tensor]:
    """The first held-out problems with their answers, padded on the right; only the answer and the end count."""
    tokenizer = build_char_tokenizer(ALPHABET)
    rows = task.test.select(range(count))
    examples = [encode_example(tokenizer, row["prompt"], row["completion"]) for row in rows]

    def pad(lists: list[list[int]], value: int) -> torch.Tensor:
        length = max(map(len, lists))
        return torch.tensor([[*ids, *[value] * (length - len(ids))] for ids in lists])

    ids, labels = zip(*examples, strict=True)
    mask = [[1] * len(row) for row in ids]
    return {
        "input_ids": pad(ids, tokenizer.pad_token_id),
        "labels": pad(labels, IGNORED),
        "attention_mask": pad(mask, 0),
    }


def measure_rollouts(task: Task, model: PreTrainedModel) -> dict[tuple[str, str], tuple]:
    """Damage and temperature by scheme and component."""
    batch, tokenizer = sequences(task, len(task.test)), build_char_tokenizer(ALPHABET)

    def accuracy(policy: PreTrainedModel) -> float:
        return evaluate_greedy(
            policy, tokenizer, task.test, task.scores, max_new_tokens=task.max_completion_length, batch_size=500
        ).accuracy(task.headline)

    results = {}
    reference = policy_logits(model, **batch)
    for scheme in SCHEMES:
        damage = component_damage(model, scheme=scheme, operands="both", components=INJECTED, score=accuracy, **batch)
        for component in INJECTED:
            with inject_component(model, component, scheme, operands="both"), evaluation_mode(model):
                temperature = effective_temperature(reference, policy_logits(model, **batch))
            results[_name(scheme), component] = (damage[component], temperature)
    return results


def measure_gradients(task: Task, model: PreTrainedModel) -> dict[tuple[str, str], tuple[GradientGain, GradientGain]]:
    """Gradients with the whole of both passes changed, and with the way back alone, by scheme and component."""
    batch = sequences(task, GRADIENT_PROBLEMS)
    return {
        (_name(scheme), component): tuple(
            gradient_gain(model, scheme=scheme, component=component, backward_only=alone, **batch)
            for alone in (False, True)
        )
        for scheme in SCHEMES
        for component in INJECTED
    }


def rollout_record(key: tuple[str, str], runs: list[tuple[ComponentDamage, EffectiveTemperature]]) -> dict:
    """One scheme and component over the seeds; `value` is the mean greedy accuracy."""
    damages, temperatures = zip(*runs, strict=True)
    value = fmean(damage.score for damage in damages)
    baseline = fmean(damage.score - damage.score_change for damage in damages)
    of_damage = ("kl", "nll_change", "top1_agreement", "entropy", "entropy_change", "weight_energy")
    of_temperature = ("predicted", "measured", "entropy_matched", "noise_variance", "gap_variance", "kl", "kl_measured")
    return {
        **_common("rollout", key, [len(runs), damages[0].n_tokens]),
        "value": value,
        "unit": "greedy accuracy, mean over seeds",
        "baseline": baseline,
        "ratio": value / baseline,
        "seeds": list(SEEDS),
        "accuracy": [damage.score for damage in damages],
        "accuracy_change": [damage.score_change for damage in damages],
        "activation_energy": [damage.activation_energy for damage in damages],
        **{name: [getattr(damage, name) for damage in damages] for name in of_damage},
        "temperature": {name: [getattr(t, name) for t in temperatures] for name in of_temperature},
    }


def gradient_record(key: tuple[str, str], gains: tuple[GradientGain, GradientGain]) -> dict:
    """One scheme and component; `value` is the log2 gain through all layers on the way back alone."""
    fields = ("log2_gain", "log2_gain_spread", "cosine", "relative_error", "predicted_sd")
    whole, alone = ({name: [getattr(d, name) for d in gain.depths] for name in fields} for gain in gains)
    return {
        **_common("gradient", key, [GRADIENT_LAYERS, GRADIENT_PROBLEMS]),
        "value": alone["log2_gain"][-1],
        "unit": f"log2 gradient gain through {GRADIENT_LAYERS} layers, backward pass alone",
        "baseline": alone["predicted_sd"][-1],
        "ratio": None,
        "by_depth_backward_only": alone,
        "by_depth": whole,
    }


def _common(kind: str, key: tuple[str, str], shape: list[int]) -> dict:
    return {
        "name": " / ".join((kind, *key)),
        "shape": shape,
        "ceiling_fraction": None,
        **made(COMMAND, PACKAGES, f"{platform.machine()} CPU"),
    }


def _name(scheme: QuantScheme) -> str:
    return str(scheme).removeprefix("mxfp4+")


def _print_table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    print(f"\n{title}\n\n{table(columns, rows)}", end="")


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()  # no options, but --help runs nothing
    task = load_task("arithmetic")
    by_seed = [measure_rollouts(task, train(task, num_layers=4, seed=seed)) for seed in SEEDS]
    gradients = measure_gradients(task, train(task, num_layers=GRADIENT_LAYERS, seed=0))
    rollout_records = {key: rollout_record(key, [results[key] for results in by_seed]) for key in by_seed[0]}
    gradient_records = {key: gradient_record(key, gains) for key, gains in gradients.items()}

    rows, temperature_rows = [], []
    for key, record in rollout_records.items():
        kl, energy = fmean(record["kl"]), fmean(record["weight_energy"])
        rows.append(
            [
                *key,
                f"{record['value']:.3f}",
                " ".join(f"{100 * change:+.1f}" for change in record["accuracy_change"]),
                f"{kl:.4f}",
                f"{fmean(record['nll_change']):+.4f}",
                f"{fmean(record['top1_agreement']):.3f}",
                " ".join(f"{change:+.4f}" for change in record["entropy_change"]),
                f"{100 * energy:.4f}",
                f"{kl / energy:.2f}",
            ]
        )
        t = {name: fmean(values) for name, values in record["temperature"].items()}
        explained = 1 - t["kl_measured"] / t["kl"]
        values = [f"{t[name]:.4f}" for name in ("predicted", "measured", "entropy_matched")]
        temperature_rows.append([*key, *values, f"{100 * explained:.1f} %"])
    baseline = next(iter(rollout_records.values()))["baseline"]
    _print_table(
        f"Rollouts ({len(SEEDS)} seeds, W4A4; full precision {baseline:.3f})",
        ["scheme", "component", "accuracy", "change, pp, by seed", "KL", "NLL", "top-1", "entropy, by seed"]
        + ["energy / weights, %", "KL / energy"],
        rows,
    )
    _print_table(
        "Effective temperature (means over seeds)",
        ["scheme", "component", "predicted", "measured", "entropy-matched", "KL that a temperature explains"],
        temperature_rows,
    )
    rows = []
    for key, record in gradient_records.items():
        alone, whole = record["by_depth_backward_only"], record["by_depth"]
        rows.append(
            [
                *key,
                f"{alone['log2_gain'][-1]:+.3f} ± {alone['log2_gain_spread'][-1]:.3f}",
                f"{alone['predicted_sd'][-1]:.3f}",
                f"{alone['cosine'][-1]:.4f}",
                f"{alone['relative_error'][1]:.3f} -> {alone['relative_error'][-1]:.3f}",
                f"{whole['log2_gain'][0]:+.3f} -> {whole['log2_gain'][-1]:+.3f}",
                f"{whole['relative_error'][0]:.3f} -> {whole['relative_error'][-1]:.3f}",
            ]
        )
    _print_table(
        f"Gradients ({GRADIENT_LAYERS} layers, {GRADIENT_PROBLEMS} problems)",
        ["scheme", "component", f"log2 gain, L={GRADIENT_LAYERS}, backward alone", "predicted sd", "cosine"]
        + [f"relative error, L=1 -> {GRADIENT_LAYERS}", f"both passes: log2 gain, L=0 -> {GRADIENT_LAYERS}"]
        + [f"both passes: relative error, L=0 -> {GRADIENT_LAYERS}"],
        rows,
    )
    records = [*rollout_records.values(), *gradient_records.values()]
    write(records, RESULTS / "pathways.json")


if __name__ == "__main__":
    main()
