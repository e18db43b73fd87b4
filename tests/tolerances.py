"""One table of tolerances, with the reason for each. Relative, unless the comment names a unit."""

# Whole runs in fp32: end points as a fraction of the way travelled (the issue asks for 0.2 %).
WAY_FP32 = 2e-3
# The same for small plain models: the same products summed in another order, which Adam amplifies near g = 0.
WAY_FP32_SMALL = 2e-4
# 8-bit moments against fp32 ones over a few steps (measured: 1 %), and where Lion's signs flip (8 %).
WAY_8BIT, WAY_8BIT_LION = 0.03, 0.2
# Under autocast the baseline rounds gradients to bf16 (8 bits), which Adam's early, sign-like steps amplify.
WAY_AUTOCAST = 2e-2
# Lion: one sign that flips near 0 moves a weight by 2 lr.
WAY_LION = 5e-3
# fp16 autocast with a loss scale: the baseline rounds gradients to 11 bits, ours stay fp32.
WAY_SCALER = 5e-3
# Logged gradient norms, relative.
GRAD_NORM = 1e-3
# Norms of small fp32 models: sums of some hundred squares in another order.
NORM_FP32 = 1e-5
# The baseline's gradients are rounded to bf16 before their norm is taken.
NORM_AUTOCAST = 1e-2
# The Gram form cancels: its error is eps times (sum of its terms' sizes / result), at most about T = 64 here.
NORM_GRAM = 1e-4
# Distance to the fp32 run, ours over torch's in the same dtype; over 1 is the noise of few seeds.
THREE_WAY = 1.1
# The same with stochastic rounding, which keeps what rounding to nearest loses: measured 0.65.
THREE_WAY_STOCHASTIC = 0.9
# fp32 products, in units of ||dY|| ||X||: dot products of up to 100 terms against float64.
GEMM_FP32 = 2e-6
# One rounding to bf16 (8 bits) per addition, in units of ||dY|| ||X||.
DENSE_BF16 = 2.0**-7
# One fp32 update against the same formula in float64, in units of lr + |w|.
UPDATE_FP32 = 2e-6
# One rounding of a stored value to bf16 or fp16, up or down.
ROUND_BF16 = 2.0**-7
ROUND_FP16 = 2.0**-10
# Mean of stochastic roundings, in standard errors of uniform noise: a right one fails once in a million keys.
MEAN_STANDARD_ERRORS = 5.0
# Rows of a GaLore basis: off-diagonal and norm errors of Cholesky-QR in fp32 with up to 70 columns.
ORTHONORMAL = 1e-4
# GaLore against its published rule in float64 over 50 steps, and with 8-bit moments (the figures).
WAY_GALORE, WAY_GALORE_8BIT = 0.01, 0.05
