"""What is lost, repeated or late is made up for, and the machine that says so can fail."""

from tests.kvcore.wire.machine import StreamMachine

TestStreams = StreamMachine.TestCase
