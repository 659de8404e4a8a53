# SPDX-License-Identifier: Apache-2.0
from ..prepare import Smoothing as Smoothing, find_places as find_places, smooth_model as smooth_model
from . import layers as layers, planning as planning, reports as reports, source as source, weights as weights
from .comparison import (
    Comparison as Comparison,
    compare_checkpoints as compare_checkpoints,
    compare_sources as compare_sources,
)
from .doctor import KernelCheck as KernelCheck, check_kernels as check_kernels
from .evaluation import Evaluation as Evaluation, FULL_PRECISION as FULL_PRECISION, Row as Row
from .figures import (
    cosine_figure as cosine_figure,
    delta_figure as delta_figure,
    front_figure as front_figure,
    layer_labels as layer_labels,
    ratio_figure as ratio_figure,
)
from .gptq import round_model as round_model
from .layers import Selection as Selection
from .loading import load as load, rewrite_checkpoint as rewrite_checkpoint
from .perplexity import (
    ScoreLog as ScoreLog,
    evaluate as evaluate,
    evaluate_checkpoint as evaluate_checkpoint,
    texts_to_predict as texts_to_predict,
)
from .planning import Setup as Setup, plan as plan, sizes_of as sizes_of
from .reports import (
    write_analysis as write_analysis,
    write_comparison as write_comparison,
    write_evaluation as write_evaluation,
)
from .resume_log import ProgressMismatch as ProgressMismatch
from .rounding import round_weight as round_weight
from .routers import RouterStatistics as RouterStatistics, router_statistics as router_statistics
from .run_report.charts import plot_training as plot_training
from .run_report.health import health_checks as health_checks
from .run_report.log import RunLogError as RunLogError, read_run as read_run
from .run_report.page import (
    RunReportCallback as RunReportCallback,
    write_run_picture as write_run_picture,
    write_run_report as write_run_report,
)
from .schemes import (
    ModelScheme as ModelScheme,
    PAPER_SCHEMES as PAPER_SCHEMES,
    read_schemes as read_schemes,
    swapped as swapped,
    without_each as without_each,
)
from .scoring import Score as Score, reference_of as reference_of, score as score
from .source import SourceError as SourceError, open_source as open_source
from .statistics import ErrorStatistics as ErrorStatistics, error_statistics as error_statistics, sample as sample
from .texts import TextOptions as TextOptions
from .weights import (
    Analysis as Analysis,
    TensorLog as TensorLog,
    TensorResult as TensorResult,
    analyze_weights as analyze_weights,
)
