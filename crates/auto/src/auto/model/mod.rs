//! The model: how programs use caches, plans as layouts of sites, and their scores.
//!
//! To read it: [`program_model`] (the curve of one program), [`composition`] (programs that share one cache), [`bus`]
//! (programs that share memory), then [`score`] (a whole plan); [`problem`] and [`layout`] say what a plan is here.

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
