//! Transfers under way. Each passes some resources (a link's one direction, a host's memory), which divide what they
//! carry evenly among those that pass; a transfer is as fast as the least of its shares. What a transfer leaves of its
//! share of a pool, because a link holds it up, goes to the others there; of a link it is lost, which is a little
//! pessimistic where several pass several links, and keeps a change among the neighbours.

/// Something that transfers pass.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Resource {
    pub bytes_per_second: f64,
    /// Whether what one does not use goes to the others.
    pub is_pool: bool,
}

/// A number of a transfer, reused after its end.
pub type Flow = usize;

struct Under {
    bytes_left: f64,
    rate: f64,
    since: f64,
    resources: Vec<u32>,
    /// Raised whenever its end changes: ends that were foreseen before are void.
    version: u32,
    is_under_way: bool,
    /// The last change that it was looked at for.
    seen: u64,
}

/// An end as it is foreseen now.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct End {
    pub at: f64,
    pub flow: Flow,
    pub version: u32,
}

pub struct Flows {
    resources: Vec<Resource>,
    /// What a transfer gets at the most of each resource that is a pool.
    levels: Vec<f64>,
    /// Who passes each.
    passing: Vec<Vec<Flow>>,
    flows: Vec<Under>,
    free: Vec<Flow>,
    /// Changes so far.
    changes: u64,
}

impl Flows {
    pub fn new(resources: Vec<Resource>) -> Flows {
        let passing = vec![Vec::new(); resources.len()];
        let levels = resources.iter().map(|resource| resource.bytes_per_second).collect();
        Flows { resources, levels, passing, flows: Vec::new(), free: Vec::new(), changes: 0 }
    }

    /// Begins a transfer; the ends that change are given to `foresee`, its own among them.
    pub fn begin(&mut self, now: f64, bytes: f64, resources: &[u32], foresee: &mut impl FnMut(End)) -> Flow {
        let under = Under {
            bytes_left: bytes,
            rate: f64::INFINITY,
            since: now,
            resources: resources.to_vec(),
            version: 0,
            is_under_way: true,
            seen: 0,
        };
        let flow = match self.free.pop() {
            Some(flow) => {
                let version = self.flows[flow].version + 1;
                self.flows[flow] = Under { version, ..under };
                flow
            }
            None => {
                self.flows.push(under);
                self.flows.len() - 1
            }
        };
        for resource in resources {
            self.passing[*resource as usize].push(flow);
        }
        self.share_anew(now, resources, foresee);
        flow
    }

    /// Whether an end that was foreseen has come; then the transfer is over and others go faster.
    pub fn end(&mut self, end: End, foresee: &mut impl FnMut(End)) -> bool {
        let under = &mut self.flows[end.flow];
        if !under.is_under_way || under.version != end.version {
            return false;
        }
        under.is_under_way = false;
        let resources = std::mem::take(&mut under.resources);
        for resource in &resources {
            self.passing[*resource as usize].retain(|flow| *flow != end.flow);
        }
        self.free.push(end.flow);
        self.share_anew(end.at, &resources, foresee);
        true
    }

    /// Rates of all that pass some resources, or a pool that one of those passes too.
    fn share_anew(&mut self, now: f64, changed: &[u32], foresee: &mut impl FnMut(End)) {
        let mut resources = changed.to_vec();
        for flow in self.pass_any(changed) {
            let pools = self.flows[flow].resources.iter();
            resources.extend(pools.filter(|resource| self.resources[**resource as usize].is_pool));
        }
        resources.sort_unstable();
        resources.dedup();
        for resource in &resources {
            if self.resources[*resource as usize].is_pool {
                self.levels[*resource as usize] = self.level(*resource as usize);
            }
        }
        for flow in self.pass_any(&resources) {
            let rate = self.rate(flow);
            let under = &mut self.flows[flow];
            if rate == under.rate {
                continue;
            }
            if under.rate.is_finite() {
                under.bytes_left = (under.bytes_left - (now - under.since) * under.rate).max(0.0);
            }
            (under.rate, under.since) = (rate, now);
            under.version += 1;
            foresee(End { at: now + under.bytes_left / rate, flow, version: under.version });
        }
    }

    /// Who passes some resources, each once: a collective passes as many as it has members, and would be looked at
    /// for each of them.
    fn pass_any(&mut self, resources: &[u32]) -> Vec<Flow> {
        self.changes += 1;
        let mut found = Vec::new();
        for resource in resources {
            for flow in &self.passing[*resource as usize] {
                let seen = &mut self.flows[*flow].seen;
                if *seen != self.changes {
                    *seen = self.changes;
                    found.push(*flow);
                }
            }
        }
        found
    }

    /// An even share of a resource that is no pool.
    fn share(&self, resource: usize) -> f64 {
        self.resources[resource].bytes_per_second / self.passing[resource].len().max(1) as f64
    }

    /// What each may take of a pool: more than an even share, where links hold others below theirs.
    fn level(&self, pool: usize) -> f64 {
        let links = |flow: &Flow| {
            let others = self.flows[*flow].resources.iter().map(|resource| *resource as usize);
            let links = others.filter(|resource| !self.resources[*resource].is_pool);
            links.map(|resource| self.share(resource)).fold(f64::MAX, f64::min)
        };
        let mut held_at: Vec<f64> = self.passing[pool].iter().map(links).collect();
        held_at.sort_unstable_by(f64::total_cmp);
        let mut left = self.resources[pool].bytes_per_second;
        for (place, held_at_link) in held_at.iter().enumerate() {
            let even = left / (held_at.len() - place) as f64;
            if *held_at_link > even {
                return even;
            }
            left -= held_at_link;
        }
        self.resources[pool].bytes_per_second
    }

    fn rate(&self, flow: Flow) -> f64 {
        let shares = self.flows[flow].resources.iter().map(|resource| {
            let resource = *resource as usize;
            if self.resources[resource].is_pool { self.levels[resource] } else { self.share(resource) }
        });
        shares.fold(f64::MAX, f64::min)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Plays transfers of (begin, bytes, resources) through; their ends.
    fn play(capacities: &[f64], transfers: &[(f64, f64, &[u32])]) -> Vec<f64> {
        let links = capacities.iter().map(|rate| Resource { bytes_per_second: *rate, is_pool: false });
        play_over(links.collect(), transfers)
    }

    fn play_over(resources: Vec<Resource>, transfers: &[(f64, f64, &[u32])]) -> Vec<f64> {
        let mut flows = Flows::new(resources);
        let mut foreseen: Vec<End> = Vec::new();
        let mut of = std::collections::HashMap::new();
        let mut ends = vec![0.0; transfers.len()];
        let mut next = 0;
        loop {
            foreseen.sort_by(|a, b| b.at.total_cmp(&a.at));
            let begins = transfers.get(next).map(|transfer| transfer.0);
            match (begins, foreseen.last().copied()) {
                (Some(at), end) if end.is_none_or(|end| at <= end.at) => {
                    let (_, bytes, resources) = transfers[next];
                    let flow = flows.begin(at, bytes, resources, &mut |end| foreseen.push(end));
                    of.insert(flow, next);
                    next += 1;
                }
                (_, Some(end)) => {
                    foreseen.pop();
                    if flows.end(end, &mut |end| foreseen.push(end)) {
                        ends[of[&end.flow]] = end.at;
                    }
                }
                (_, None) => return ends,
            }
        }
    }

    #[test]
    fn those_that_pass_share() {
        // Alone at 10 bytes a second; two from 0 on; one that joins halfway.
        assert_eq!(play(&[10.0], &[(0.0, 100.0, &[0])]), [10.0]);
        assert_eq!(play(&[10.0], &[(0.0, 100.0, &[0]), (0.0, 100.0, &[0])]), [20.0, 20.0]);
        assert_eq!(play(&[10.0], &[(0.0, 100.0, &[0]), (5.0, 50.0, &[0])]), [15.0, 15.0]);
        // The narrower of two resources decides; the wider is not held up by it.
        assert_eq!(play(&[10.0, 5.0], &[(0.0, 50.0, &[0, 1]), (0.0, 50.0, &[0])]), [10.0, 10.0]);
        // After one ends, the other has all.
        assert_eq!(play(&[10.0], &[(0.0, 20.0, &[0]), (0.0, 100.0, &[0])]), [4.0, 12.0]);
    }

    #[test]
    fn a_transfer_over_many_resources_is_looked_at_once_a_change() {
        let mut flows = Flows::new(vec![Resource { bytes_per_second: 1.0, is_pool: false }; 100]);
        let all: Vec<u32> = (0..100).collect();
        let wide = flows.begin(0.0, 1.0, &all, &mut |_| {});
        let narrow = flows.begin(0.0, 1.0, &[7], &mut |_| {});
        assert_eq!(flows.pass_any(&all), [wide, narrow]);
        assert_eq!(flows.pass_any(&[3]), [wide]);
        assert!(flows.pass_any(&[]).is_empty());
    }

    #[test]
    fn a_pool_gives_to_others_what_links_hold_up() {
        let resource = |bytes_per_second, is_pool| Resource { bytes_per_second, is_pool };
        let all = vec![resource(100.0, true), resource(10.0, false), resource(20.0, false)];
        // Two over links of 10 and 20, and one that has the other 70; when they end, all.
        let transfers: [(f64, f64, &[u32]); 3] =
            [(0.0, 100.0, &[0, 1]), (0.0, 200.0, &[0, 2]), (0.0, 800.0, &[0])];
        assert_eq!(play_over(all.clone(), &transfers), [10.0, 10.0, 11.0]);
        // Two without links share evenly.
        assert_eq!(play_over(all, &[(0.0, 100.0, &[0]), (0.0, 100.0, &[0])]), [2.0, 2.0]);
    }
}
