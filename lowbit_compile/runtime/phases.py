"""Nothing but one integer per State with a schedule, as module attributes: what Dynamo guards on. See State.phase."""
