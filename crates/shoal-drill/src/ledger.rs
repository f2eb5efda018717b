//! Who had something of which job for how long, counted a second time: from the records as they come, without looking into
//! the controller's own books. Receipts are held to it.

use std::collections::{BTreeMap, BTreeSet};

use shoal_control::controller::receipt::Amount;
use shoal_control::controller::record::{Change, Record};
use shoal_control::controller::state::{Phase, State};
use shoal_control::message::{JobId, WorkerId};

#[derive(Default)]
struct Account {
    whole: Amount,
    at_ms: u64,
    holds: Vec<WorkerId>,
    is_to_get: Vec<WorkerId>,
}

#[derive(Default)]
pub struct Ledger {
    /// Those who are alive, in nanodollars a millisecond.
    prices: BTreeMap<WorkerId, u64>,
    accounts: BTreeMap<JobId, Account>,
}

impl Account {
    fn pass(&mut self, at_ms: u64, prices: &BTreeMap<WorkerId, u64>) {
        let passed_ms = at_ms - self.at_ms.min(at_ms);
        self.at_ms = at_ms;
        let engaged: BTreeSet<&WorkerId> = self.holds.iter().chain(&self.is_to_get).collect();
        for price in engaged.into_iter().filter_map(|worker| prices.get(worker)) {
            self.whole.worker_ms += passed_ms;
            self.whole.nanodollars += price * passed_ms;
        }
    }
}

impl Ledger {
    /// A controller that starts again may have records that nobody was told of.
    pub fn begin(&mut self, state: &State) {
        let price = |price: u64| price / 3_600;
        self.prices = state.members.iter().map(|(worker, member)| (*worker, price(member.price.0))).collect();
        self.accounts.clear();
        for (id, job) in &state.jobs {
            let holds = job.held().map(|plan| plan.members.clone()).unwrap_or_default();
            let is_to_get = match &job.phase {
                Phase::Moving { plan, .. } => plan.members.clone(),
                _ => Vec::new(),
            };
            let account = Account { whole: job.receipt.whole, at_ms: job.receipt.at_ms(), holds, is_to_get };
            self.accounts.insert(*id, account);
        }
    }

    pub fn whole(&self, job: JobId) -> Option<Amount> {
        self.accounts.get(&job).map(|account| account.whole)
    }

    pub fn record(&mut self, record: &Record) {
        match record {
            Record::Joined { worker, price, .. } => drop(self.prices.insert(*worker, price.0 / 3_600)),
            Record::Lost { worker, at_ms, .. } => {
                for account in self.accounts.values_mut() {
                    if account.holds.contains(worker) || account.is_to_get.contains(worker) {
                        account.pass(*at_ms, &self.prices);
                    }
                }
                self.prices.remove(worker);
            }
            Record::Submitted { job, .. } => drop(self.accounts.insert(*job, Account::default())),
            Record::Job { job, at_ms, change } => {
                let Some(account) = self.accounts.get_mut(job) else { return };
                account.pass(*at_ms, &self.prices);
                match change {
                    Change::Moving { plan, .. } => account.is_to_get.clone_from(&plan.members),
                    Change::Abandoned { .. } => account.is_to_get.clear(),
                    Change::Started => account.holds = std::mem::take(&mut account.is_to_get),
                    Change::Restored { .. } | Change::Released | Change::Rested { .. } => {
                        account.holds.clear()
                    }
                    _ => {}
                }
            }
            _ => {}
        }
    }
}
