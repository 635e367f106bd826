"""What holds for all tests."""

import signal

# A shell starts what it runs in the background with SIGINT ignored, and so would be all that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
