"""Judges that score stories, and what belongs to them.

judges.py        the judges, the check that their scores differ, and the flags that choose one
rating.py        what a judge is asked, and how its reply is read
story_rules.py   the rules that a text must keep before a judge sees it
endpoint.py      an OpenAI-compatible endpoint, for judges and for gold data
"""
