"""What tests of several folders share of private modules: switches, and readers of programs."""

from jgrad._arithmetic.elementwise import inner_equations as inner_equations
from jgrad._backward.step_in_backward import forced as forced
from jgrad._kernels import platforms as platforms
from jgrad._quantized.encoding import decoded as decoded
from jgrad._quantized.geometry import geometry as geometry
from jgrad._trees import forms as forms, host_memory as host_memory
from jgrad._trees.told import telling as telling
