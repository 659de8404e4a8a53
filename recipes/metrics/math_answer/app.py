# SPDX-License-Identifier: Apache-2.0
"""The page of the Space."""

import evaluate
from evaluate.utils import launch_gradio_widget


launch_gradio_widget(evaluate.load("math_answer.py"))
