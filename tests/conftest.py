from hypothesis import settings

# The machine that runs the tests may be busy: a slow example is no failure.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
