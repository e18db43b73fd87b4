"""One table of tolerances, with the reason for each."""

# Whole runs in fp32: end points as a fraction of the way travelled (the issue asks for 0.2 %).
WAY_FP32 = 2e-3
# Under autocast the baseline rounds every gradient to bf16 (8 bits), which Adam's early, sign-like steps amplify.
WAY_AUTOCAST = 2e-2
# Logged gradient norms, relative.
GRAD_NORM = 1e-3
