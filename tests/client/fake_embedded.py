"""What `python -m waferbox.cluster.embedded` looks like from outside; FAKE_EMBEDDED says how it behaves."""

import os
import sys
import time

behaviour = os.environ["FAKE_EMBEDDED"]
if behaviour == "dies":
    print("no memory left", file=sys.stderr)
    sys.exit(1)
if behaviour == "babbles":
    print("hello", flush=True)
elif behaviour != "silent":
    print('{"management": "127.0.0.1:4711"}', flush=True)
if behaviour == "fails":
    print("the fork server was killed", file=sys.stderr)
    sys.exit(1)
sys.stdin.read()
if behaviour == "stubborn":
    time.sleep(600)
