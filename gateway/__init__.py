"""The gateway: admits requests, schedules steps, streams tokens."""
