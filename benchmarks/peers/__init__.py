"""The contenders: aiockpt and its peers at their best settings, to save, load, open and read parts."""
