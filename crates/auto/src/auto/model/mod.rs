//! The model: how programs use caches, plans as layouts of sites, and their scores.

pub mod bus;
mod calibration;
pub mod composition;
pub mod decided_plan;
pub mod forecast;
pub mod layout;
pub mod problem;
pub mod program_model;
pub mod score;
pub mod score_cache;
pub mod search_input;
mod site_score;
pub mod sites;
pub mod unmet_goals;
