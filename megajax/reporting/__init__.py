"""Reports for people: what a run did (`megajax.report`), and what a machine is fit for (`megajax.doctor`)."""
