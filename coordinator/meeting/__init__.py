"""Meeting by ticket: a driver that reaches all processes, by Ray or by calls of its own, brings them together.

Each process offers itself once (`offer`); that of rank 0 listens from then on. The driver makes a ticket for each
offer (`make_tickets`) and hands it over by a method call, and each process joins the world with its own:
`init_distributed_environment(meeting=ticket)`. No port is chosen and lost again, and the environment holds nothing.
`report_loss` tells a process that a rank has died whose end it cannot see itself.
"""

from coordinator.meeting.losses import report_loss
from coordinator.meeting.offers import offer, withdraw
from coordinator.meeting.tickets import Offer, Ticket, make_tickets

__all__ = ["Offer", "Ticket", "make_tickets", "offer", "report_loss", "withdraw"]
