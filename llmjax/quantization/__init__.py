"""From a float model to an INT8 one: calibration, sensitivity, plan, quality. Above the model, beside the engine.

Modules that only handle numbers already collected import no JAX.
"""
