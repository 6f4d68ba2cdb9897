"""What tests share: numbers that they compare with, ways to run a program, and how to break one."""
