"""The project attacked as a hostile reviewer and a careless user would: `python -m benchmarks.attacks`.

Each module of this folder but `outcome` and `__main__` is a group of attacks with one function
`attacks(folder, sample)`, which makes its own projects in the folder, attacks them by the commands that users run, and
yields an `Outcome` for each attack. With `sample` it yields the few that the tests run.
"""
