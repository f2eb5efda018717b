//! What holds for a worker now, as a function of the state. It is said whenever it may have changed, and again until the
//! worker has shown that it knows.

use std::collections::BTreeMap;

use super::state::{Base, Job, Phase, State};
use crate::message::{Command, JobId, Order, Save, WorkerId};

pub fn orders(state: &State, worker: WorkerId) -> BTreeMap<JobId, Order> {
    let order = |(id, job): (&JobId, &Job)| order(state, job, worker).map(|order| (*id, order));
    state.jobs.iter().filter_map(order).collect()
}

fn order(state: &State, job: &Job, worker: WorkerId) -> Option<Order> {
    // Those who have the state take part in moving it, though they may have none of the new plan's.
    if let Phase::Moving { plan, sources } = &job.phase
        && (plan.place(worker).is_some() || sources.contains(&worker))
    {
        let command = Command::Install(state.installation(job, plan));
        return Some(Order { epoch: job.epoch, command, save: None });
    }
    let Base::Held { epoch, plan, step } = &job.base else { return None };
    plan.place(worker)?;
    let command = match &job.phase {
        Phase::Running => Command::Run { steps: job.spec.steps },
        Phase::Stopping { after, .. } => Command::Stop { after: *after },
        Phase::Settling { step, closing, .. } => Command::GoTo { step: *step, closing: *closing },
        // At one step: it stays there until it is let go.
        Phase::Planning { .. } | Phase::Moving { .. } | Phase::Saving | Phase::Resting(_) => {
            Command::GoTo { step: *step, closing: None }
        }
    };
    let writes = |save: &&Save| save.writers.contains(&worker);
    Some(Order { epoch: *epoch, command, save: job.saving.as_ref().filter(writes).cloned() })
}
