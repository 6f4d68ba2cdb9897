"""How often XLA compiles."""

import jax


def compilations(call, *args):
    """How often XLA is asked to compile while `call` runs with each of `args`."""
    events = []
    listen = lambda event, *rest, **kwargs: events.append(event)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for arg in args:
            call(arg)
    finally:
        jax.monitoring.clear_event_listeners()
    return sum("backend_compile" in event for event in events)
