"""Judges that score stories, and what belongs to them.

judges.py         the judges, and the flags that choose one
rating.py         what a rating judge reads, and how its reply is read
judge_report.py   how a judge is measured before it is trusted
story_rules.py    the rules that a text must keep before a judge sees it
endpoint.py       an OpenAI-compatible endpoint, for judges and for gold data
"""
