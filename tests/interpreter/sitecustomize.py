"""Have kernels interpreted in a child process as they are in its tests.

Every Python process whose PYTHONPATH names this folder imports this module as it begins.
"""

import interpreter_hook  # noqa: F401
