import signal

from hypothesis import settings

# The machine that runs the tests may be busy: a slow example is no failure.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# A shell that starts the tests in the background has Ctrl-C ignored, which the tests of it need.
signal.signal(signal.SIGINT, signal.default_int_handler)
