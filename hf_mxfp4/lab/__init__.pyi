# SPDX-License-Identifier: Apache-2.0
from ..prepare import find_places as find_places, smooth_model as smooth_model, Smoothing as Smoothing
from ..prepare.gptq import round_model as round_model
from ..prepare.rounding import round_weight as round_weight
from . import planning as planning, reports as reports
from .doctor import check_kernels as check_kernels, KernelCheck as KernelCheck
from .errors.comparison import (
    compare_checkpoints as compare_checkpoints,
    compare_sources as compare_sources,
    Comparison as Comparison,
)
from .errors.layers import Selection as Selection
from .errors.source import open_source as open_source, SourceError as SourceError
from .errors.statistics import (
    error_statistics as error_statistics,
    ErrorStatistics as ErrorStatistics,
    sample as sample,
)
from .errors.weights import (
    Analysis as Analysis,
    analyze_weights as analyze_weights,
    TensorLog as TensorLog,
    TensorResult as TensorResult,
)
from .evaluation.loading import load as load, rewrite_checkpoint as rewrite_checkpoint
from .evaluation.perplexity import (
    evaluate as evaluate,
    evaluate_checkpoint as evaluate_checkpoint,
    ScoreLog as ScoreLog,
    texts_to_predict as texts_to_predict,
)
from .evaluation.results import Evaluation as Evaluation, FULL_PRECISION as FULL_PRECISION, Row as Row
from .evaluation.routers import router_statistics as router_statistics, RouterStatistics as RouterStatistics
from .evaluation.schemes import (
    ModelScheme as ModelScheme,
    PAPER_SCHEMES as PAPER_SCHEMES,
    read_schemes as read_schemes,
    swapped as swapped,
    without_each as without_each,
)
from .evaluation.scoring import reference_of as reference_of, Score as Score, score as score
from .evaluation.texts import TextOptions as TextOptions
from .figures import (
    cosine_figure as cosine_figure,
    delta_figure as delta_figure,
    front_figure as front_figure,
    layer_labels as layer_labels,
    ratio_figure as ratio_figure,
)
from .planning import plan as plan, Setup as Setup, sizes_of as sizes_of
from .reports import (
    write_analysis as write_analysis,
    write_comparison as write_comparison,
    write_evaluation as write_evaluation,
)
from .resume_log import ProgressMismatch as ProgressMismatch
from .run_report.charts import plot_training as plot_training
from .run_report.health import health_checks as health_checks
from .run_report.log import read_run as read_run, RunLogError as RunLogError
from .run_report.page import (
    RunReportCallback as RunReportCallback,
    write_run_picture as write_run_picture,
    write_run_report as write_run_report,
)
