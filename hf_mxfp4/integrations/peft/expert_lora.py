# SPDX-License-Identifier: Apache-2.0
"""LoRA on packed experts: a pair of factors for each projection of each expert, as a PEFT layer."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer, check_adapters_to_merge
from torch import nn

from ...gemm import PACKED_FIELDS, PACKED_SUFFIXES, Groups, compiled_linear, quantized_linear
from .merge.merge_report import MergeError
from .merge.merging import MergesIntoPacked


#: Of one adapter and projection: ``A`` ``[experts, r, K]``, ``B`` ``[experts, N, r]``, the scaling and the dropout.
Factors = tuple[torch.Tensor, torch.Tensor, float, nn.Module]


def add_factors(
    layer: BaseTunerLayer, result: torch.Tensor, x: torch.Tensor, groups: Groups, factors: Iterable[Factors]
) -> torch.Tensor:
    """Add ``s B_e A_e x`` of each adapter, for the rows of expert ``e``, to what a projection of experts gives.

    Args:
        layer: whose adapters they are.
        result: ``[S, N]``, rows sorted by expert.
        x: ``[S, K]``, the same rows of the input in full precision.
    """
    total, linear = result, compiled_linear if torch.compiler.is_compiling() else quantized_linear
    for a, b, scaling, dropout in factors:
        inner = linear(dropout(layer._cast_input_dtype(x, a.dtype)), a, None, groups=groups)
        total = total + linear(inner, b, None, groups=groups) * scaling
    return total.to(result.dtype)


class ExpertFactors(nn.Module):
    """One side of an adapter: a parameter ``[experts, rows, columns]`` for each projection, by its name."""

    def __init__(self, sizes: dict[str, tuple[int, int, int]]):
        super().__init__()
        for projection, size in sizes.items():
            self.register_parameter(projection, nn.Parameter(torch.empty(size)))


class MXFP4LoraExperts(MergesIntoPacked, nn.Module, LoraLayer):
    """LoRA on [`MXFP4PackedExperts`]: expert ``e`` computes ``Q(x) Q(W_e)^T + b_e + s B_e A_e x`` in both projections.

    `lora_A.<adapter>.gate_up_proj` is ``[experts, r, K]``, `lora_B.<adapter>.gate_up_proj` ``[experts, N, r]``,
    likewise `down_proj`: each expert starts as PEFT's linear layers do, and one without tokens has zero gradients.
    Rank, alpha, rsLoRA, dropout, several adapters, `disable_adapter`, saving and loading are PEFT's. Merging is as in
    [`MXFP4LoraLinear`], expert by expert; `merge_error` is summed over them.
    """

    def __init__(
        self,
        base_layer: nn.Module,
        adapter_name: str,
        config: LoraConfig,
        r: int = 0,
        lora_alpha: int = 1,
        **kwargs: Any,
    ):
        super().__init__()
        LoraLayer.__init__(self, base_layer, **kwargs)
        self._active_adapter = adapter_name
        self.update_layer(adapter_name, r, lora_alpha, config, **kwargs)

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        first, last = module.projections
        return module.weight_size(first)[2], module.weight_size(last)[1]

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: LoraConfig, **kwargs: Any) -> None:
        """Add an adapter. Raises `ValueError` for a rank below 1 and for `lora_bias`, which experts have no place
        for."""
        if r <= 0:
            raise ValueError(f"r={r} is not a positive rank")
        if config.lora_bias:
            raise ValueError("lora_bias=True is not supported on experts; leave it out, or 'experts' in target_modules")
        base = self.get_base_layer()
        sizes = {projection: base.weight_size(projection) for projection in base.projections}
        self.r[adapter_name], self.lora_alpha[adapter_name] = r, lora_alpha
        self.lora_bias[adapter_name] = self.use_dora[adapter_name] = False
        self.use_rslora[adapter_name] = config.use_rslora
        self.scaling[adapter_name] = lora_alpha / (math.sqrt(r) if config.use_rslora else r)
        self.lora_dropout[adapter_name] = nn.Dropout(config.lora_dropout) if config.lora_dropout else nn.Identity()
        self.lora_A[adapter_name] = ExpertFactors({name: (e, r, columns) for name, (e, _, columns) in sizes.items()})
        self.lora_B[adapter_name] = ExpertFactors({name: (e, rows, r) for name, (e, rows, _) in sizes.items()})
        self.reset_lora_parameters(adapter_name, config.init_lora_weights)
        self._move_adapter_to_device_of_base_layer(adapter_name)
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    @torch.no_grad()
    def reset_lora_parameters(self, adapter_name: str, init_lora_weights: bool | str) -> None:
        """Set new factors as PEFT's linear layers do: ``A`` uniform (or ``"gaussian"``) and ``B`` zero, or both random
        for `False`."""
        for factors in self.lora_A[adapter_name].parameters():
            for matrix in factors:
                if init_lora_weights == "gaussian":
                    nn.init.normal_(matrix, std=1 / self.r[adapter_name])
                else:
                    nn.init.kaiming_uniform_(matrix, a=math.sqrt(5))
        for factors in self.lora_B[adapter_name].parameters():
            if init_lora_weights is not False:
                nn.init.zeros_(factors)
                continue
            for matrix in factors:
                nn.init.kaiming_uniform_(matrix, a=math.sqrt(5))

    def _move_adapter_to_device_of_base_layer(self, adapter_name: str, device: torch.device | None = None) -> None:
        # PEFT looks for a parameter called weight.
        base = self.get_base_layer()
        device = device or next(base.parameters()).device
        for factors in (self.lora_A[adapter_name], self.lora_B[adapter_name]):
            if not any(parameter.is_meta for parameter in factors.parameters()):
                factors.to(device, base.compute_dtype)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        """As that of the experts.

        Raises `ValueError` for ``adapter_names`` (another adapter for each sample), which tokens sorted by expert no
        longer tell.
        """
        if kwargs.get("adapter_names") is not None:
            raise ValueError("adapter_names in one batch is not supported on experts; call the model once per adapter")
        if self.disable_adapters and self.merged:
            self.unmerge()
        return self.get_base_layer().forward_with(self._project, hidden_states, top_k_index, top_k_weights)

    def _project(self, projection: str, x: torch.Tensor, groups: Groups) -> torch.Tensor:
        result = self.get_base_layer().project(projection, x, groups)
        if self.disable_adapters or self.merged:
            return result
        factors = []
        for name in self._names():
            a, b = (getattr(side[name], projection) for side in (self.lora_A, self.lora_B))
            factors.append((a, b, self.scaling[name], self.lora_dropout[name]))
        return add_factors(self, result, x, groups, factors)

    def _names(self, adapter_names: list[str] | None = None) -> list[str]:
        names = self.active_adapters if adapter_names is None else adapter_names
        return [name for name in names if name in self.lora_A]

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Pack the sums of the weights and these adapters (default: the active ones) in place of the weights.

        Args:
            safe_merge: raise `ValueError`, and change nothing, when a sum is not finite.

        Raises `ValueError` for weights that are not here in full.
        """
        names = [name for name in check_adapters_to_merge(self, adapter_names) if name in self.lora_A]
        if not names:
            return
        base = self.get_base_layer()
        base.check()
        names = [*self.merged_adapters, *names]
        packed = {name: torch.empty_like(getattr(base, name)) for name in base.shapes()}
        errors = []
        for projection in base.projections:
            for expert in range(base.n_experts):
                total, update = self._sum(projection, expert, names)
                if safe_merge and not total.isfinite().all():
                    raise ValueError(
                        f"{base.name}: merging {', '.join(names)} gives weights of expert {expert} that are not finite"
                    )
                parts = base.pack_matrix(total)
                for field, value in parts.items():
                    packed[f"{projection}{field.removeprefix('weight')}"][expert] = value
                errors.append(MergeError.of(total, update, self._dequantized(parts, projection)))
        if self._unmerged is None:
            self._unmerged = {name: getattr(base, name) for name in packed}
        for name, tensor in packed.items():
            setattr(base, name, nn.Parameter(tensor, requires_grad=False))
        self.merged_adapters = names
        self.merge_error = MergeError.summed(errors)

    @torch.no_grad()
    def to_plain(self, dtype: torch.dtype, adapter_names: list[str] | None = None) -> nn.Module:
        """Plain experts of weights ``Q(W) + delta``, summed in float32 and rounded to ``dtype`` once; adapters that are
        merged already count too."""
        names = [*self.merged_adapters, *(n for n in self._names(adapter_names) if n not in self.merged_adapters)]
        base = self.get_base_layer()
        plain = base.to_experts(dtype)
        for projection in base.projections:
            self._fill(getattr(plain, projection).data, projection, names)
        return plain

    @torch.no_grad()
    def effective_weight(self, projection: str, dtype: torch.dtype) -> torch.Tensor:
        """``Q(W) + delta`` of the active adapters, as the forward pass computes with, laid out as the model has it."""
        base = self.get_base_layer()
        weight = base.dequantized_weight(projection, dtype)
        if not self.merged and not self.disable_adapters:
            self._fill(weight, projection, self._names())
        return weight

    def _fill(self, weight: torch.Tensor, projection: str, names: list[str]) -> None:
        """Write the sums into a weight laid out as the model has it."""
        for expert, rows in enumerate(weight.transpose(1, 2) if self.get_base_layer().is_transposed else weight):
            rows.copy_(self._sum(projection, expert, names)[0])

    @torch.no_grad()
    def _sum(self, projection: str, expert: int, names: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """Of one expert in float32: the unmerged weight ``[N, K]`` with these adapters, and the adapters' part."""
        base = self.get_base_layer()
        stored = self._unmerged or {name: getattr(base, name) for name in base.shapes()}
        weight = self._dequantized(
            {
                field: stored[f"{projection}{suffix}"][expert]
                for field, suffix in zip(PACKED_FIELDS, PACKED_SUFFIXES, strict=True)
                if f"{projection}{suffix}" in stored
            },
            projection,
        )
        update = torch.zeros_like(weight)
        for name in names:
            a, b = (getattr(side[name], projection)[expert].to(update) for side in (self.lora_A, self.lora_B))
            update.addmm_(b, a, alpha=self.scaling[name])
        return weight + update, update

    def first_sum(self, names: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return, of the first expert's first projection in float32, the unmerged weight with these adapters, and the
        adapters' part alone."""
        return self._sum(self.get_base_layer().projections[0], 0, names)

    @torch.no_grad()
    def repacked(self, rows: torch.Tensor) -> torch.Tensor:
        """Return what rows of such a sum become when they are packed, in float32."""
        base = self.get_base_layer()
        return self._dequantized(base.pack_matrix(rows), base.projections[0])

    def _dequantized(self, packed: dict[str, torch.Tensor], projection: str) -> torch.Tensor:
        base = self.get_base_layer()
        device = next(base.parameters()).device
        packed = {field: tensor.to(device) for field, tensor in packed.items()}
        return base.unpacked(projection, packed, torch.float32)

    def __repr__(self) -> str:
        return f"lora.{super().__repr__()}"
