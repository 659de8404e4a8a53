# SPDX-License-Identifier: Apache-2.0
"""What quantization does to a model: error analysis, perplexity, comparison, GPTQ, smoothing, planning, run reports.

Only the command line, recipes and benchmarks import this package; training does not."""

from ..utils import lazy_names


__getattr__, __all__ = lazy_names(
    __name__,
    {
        "comparison": "Comparison compare_checkpoints compare_sources",
        "evaluation": "Evaluation FULL_PRECISION Row",
        "figures": "cosine_figure delta_figure front_figure layer_labels ratio_figure",
        "gptq": "round_model",
        "layers": "Selection",
        "loading": "load rewrite_checkpoint",
        "perplexity": "ScoreLog evaluate evaluate_checkpoint texts_to_predict",
        "planning": "Setup plan sizes_of",
        "reports": "write_analysis write_comparison write_evaluation",
        "resume_log": "ProgressMismatch",
        "rounding": "round_weight",
        "routers": "RouterStatistics router_statistics",
        "run_report.charts": "plot_training",
        "run_report.health": "health_checks",
        "run_report.log": "RunLogError read_run",
        "run_report.page": "RunReportCallback write_run_picture write_run_report",
        "schemes": "ModelScheme PAPER_SCHEMES read_schemes swapped without_each",
        "scoring": "Score reference_of score",
        "smoothing": "smooth_model",
        "source": "SourceError open_source",
        "statistics": "ErrorStatistics error_statistics sample",
        "texts": "TextOptions",
        "weights": "Analysis TensorLog TensorResult analyze_weights",
    },
    parts=("layers", "planning", "reports", "source", "weights"),
)
