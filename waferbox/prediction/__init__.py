"""The prediction of a step's time on a cluster of any size, which `waferbox plan` shows: the schedules of a plan,
played.
"""
