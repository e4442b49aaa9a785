"""Pipeline schedules as data: make, place, draw and check the order in which devices run the actions of a step."""

from headrace.plan.draw.diagram import write_diagram
from headrace.plan.draw.text import draw_timeline
from headrace.plan.schedule import Action, Op, Order, Work, make_order, needs, schedule_names
from headrace.plan.simulation import equal_stages, make_table, per_stage, simulate
from headrace.plan.timeline import Timetable

__all__ = [
    "Action",
    "Op",
    "Order",
    "Timetable",
    "Work",
    "draw_timeline",
    "equal_stages",
    "make_order",
    "make_table",
    "needs",
    "per_stage",
    "schedule_names",
    "simulate",
    "write_diagram",
]
