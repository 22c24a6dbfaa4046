"""Homework: a chapter's exercises as notebooks to hand out, and their grading.

For the author of a chapter
---------------------------
The exercises are written in the chapter, where the book build runs them too. Only what is marked
goes into the homework; everything else (prose, widgets, an AnswerBox with its answer) stays out.

Text. The Markdown of an exercise stands between `{exercise-start}` and `{exercise-end}`, or in an
`{exercise}` directive, or in an `{admonition}` with `:class: exercise`. Inside it, `{hint}` and
other admonitions become folded blocks. Dropped are `{solution}`, `{solution-start}` to
`{solution-end}`, and any admonition with the word solution or answer in its class or at the start
of its title. `{eval}` cannot stand in an exercise (there is no page to compute it on): an error.

Code cells, by tag; `exercise: {id: ..., points: ...}` sits in the cell's metadata:

    exercise        the stub that the student edits. Its top-level names are what tests may use.
                    Untouched, it must fail every test: `raise NotImplementedError`, `x = None`.
    solution        the reference, with the same names. Never handed out.
    test            shown and handed out; needs points (0 is allowed: a check of the form only).
    hidden-test     run by the book build and the grader, never handed out; needs points.
    homework-setup  imports and data that exercises need; handed out, read-only. It has no id.
                    Files it reads: metadata `homework: {files: [runs/x.json]}`, relative to the
                    chapter's folder; they are handed out beside the notebook.

All cells of one exercise share the id (letters, digits, dashes) and stand in this order, and the
text stands before them. Points on the exercise cell are optional and must equal the sum.
A test sees only the names that the stub of its exercise defines; it imports the rest itself
(`from rlcore.checking import check_close`) and calls none of the page's other variables.
A visible test of an exercise by hand would show the answer: give it `check_number` or
`check_choice` without an answer, and put the comparison into a hidden test.

`python -m book homework --check` proves it: the untouched notebook scores 0, the reference all.
"""
