"""Graph passes over Dynamo's graph, before AOTAutograd: match finds, the policy decides, rewrite edits."""
