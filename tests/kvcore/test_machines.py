"""The machines on the real thing, under whatever Hypothesis profile is loaded."""

from tests.kvcore import machines

TestFreeQueue = machines.FreeQueueMachine.TestCase
TestPool = machines.PoolMachine.TestCase
TestManager = machines.ManagerMachine.TestCase
