"""Element types, as the old compiler's settings name them."""

T_F16 = 1
T_F32 = 2
T_CB16 = 3
