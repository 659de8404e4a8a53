# SPDX-License-Identifier: Apache-2.0
"""What quantization does to a model: error analysis, perplexity, comparison, GPTQ, smoothing, planning, run reports.

Only the command line, recipes and benchmarks import this package; training does not."""

from ..utils import lazy_names


_LAZY = {
    "Analysis": "weights",
    "Comparison": "comparison",
    "ErrorStatistics": "statistics",
    "Evaluation": "evaluation",
    "FULL_PRECISION": "evaluation",
    "ModelScheme": "schemes",
    "PAPER_SCHEMES": "schemes",
    "Problem": "source",
    "ProgressMismatch": "resume_log",
    "RouterStatistics": "routers",
    "Row": "evaluation",
    "RunLogError": "run_report.log",
    "RunReportCallback": "run_report.page",
    "Score": "scoring",
    "ScoreLog": "perplexity",
    "Selection": "layers",
    "Setup": "planning",
    "SourceError": "source",
    "TensorLog": "weights",
    "TensorResult": "weights",
    "TextOptions": "texts",
    "analyze_weights": "weights",
    "compare_checkpoints": "comparison",
    "compare_sources": "comparison",
    "cosine_figure": "figures",
    "delta_figure": "figures",
    "error_statistics": "statistics",
    "evaluate": "perplexity",
    "evaluate_checkpoint": "perplexity",
    "front_figure": "figures",
    "health_checks": "run_report.health",
    "layer_labels": "figures",
    "load": "loading",
    "open_source": "source",
    "plan": "planning",
    "plot_training": "run_report.charts",
    "ratio_figure": "figures",
    "read_run": "run_report.log",
    "read_schemes": "schemes",
    "reference_of": "scoring",
    "rewrite_checkpoint": "loading",
    "round_model": "gptq",
    "round_weight": "rounding",
    "router_statistics": "routers",
    "sample": "statistics",
    "score": "scoring",
    "sizes_of": "planning",
    "smooth_model": "smoothing",
    "swapped": "schemes",
    "texts_to_predict": "perplexity",
    "without_each": "schemes",
    "write_analysis": "reports",
    "write_comparison": "reports",
    "write_evaluation": "reports",
    "write_run_picture": "run_report.page",
    "write_run_report": "run_report.page",
}

__all__ = sorted(_LAZY)

__getattr__ = lazy_names(__name__, _LAZY)
