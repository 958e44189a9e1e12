"""How much memory and time a run will take, before it is paid for."""
