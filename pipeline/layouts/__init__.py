"""A plan with its choices given: a model, a described cluster, dp, tp, pp in words; priced by the planner's model."""
