"""In the place of dill, which the vendor's environment has and ours has not: reads what pickle has written."""

from pickle import loads as loads
