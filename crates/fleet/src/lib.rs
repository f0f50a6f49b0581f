//! A simulated fleet of hosts: which services should share a cache, and how many hosts a promise
//! requires.
//!
//! The cluster's scheduler decides which services share a host's cache, capacity is bought before
//! that can be measured, and production clusters are not available for experiments. So hosts,
//! services and arrivals come from a description or a seed, and every policy places *the same*
//! arrivals. The interval machine gives the steady speeds of the services on one cache, once for
//! each combination, because a fleet of 40,000 services has few different ones. The scheduler
//! extender ranks nodes with [`scorer`], the module that the `forecast` policy uses here, so that
//! what is simulated is what is shipped.
//!
//! For example, 60 hosts of `examples/fleet.toml` keep 77.3 % of the limits if services are placed
//! by their requests, and 83.2 % if they are placed by forecasts; the same 77.3 % need 53 hosts
//! then.
//!
//! # Invariants
//! - The same seed gives the same bits on any number of workers.
//! - Missing knowledge never decides, and a forecast makes no service unschedulable.
//! - An unmeasured cache is not published as an idle one.
//! - Time and memory grow linearly with hosts, because hosts are simulated in cells of bounded
//!   size.

#![warn(missing_docs)]

pub mod arrivals;
pub mod cell;
pub mod cluster_export;
pub mod corun;
pub mod extender;
mod fleet_page;
pub mod host;
pub mod node_report;
mod node_table;
pub mod outcome;
pub mod placement;
mod placement_ledger;
mod placement_policy;
pub mod profile;
pub mod publication;
pub mod scorer;
pub mod spec;
pub mod study;
