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

#[derive(Default)]
struct Under {
    bytes_left: f64,
    rate: f64,
    since: f64,
    links: Vec<u32>,
    pools: Vec<u32>,
    /// The least of its shares of links.
    held_at: f64,
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
    /// Whom a change concerns, and which pools; kept for their room.
    concerned: Vec<Flow>,
    pools: Vec<u32>,
    held_at: Vec<f64>,
}

impl Flows {
    pub fn new(resources: Vec<Resource>) -> Flows {
        let passing = vec![Vec::new(); resources.len()];
        let levels = resources.iter().map(|resource| resource.bytes_per_second).collect();
        Flows {
            resources,
            levels,
            passing,
            flows: Vec::new(),
            free: Vec::new(),
            changes: 0,
            concerned: Vec::new(),
            pools: Vec::new(),
            held_at: Vec::new(),
        }
    }

    /// What so many bytes take where nothing else passes.
    pub fn seconds_alone(&self, bytes: f64, resources: &[u32]) -> f64 {
        let rates = resources.iter().map(|resource| self.resources[*resource as usize].bytes_per_second);
        bytes / rates.fold(f64::INFINITY, f64::min)
    }

    /// Begins a transfer; the ends that change are given to `foresee`, its own among them.
    pub fn begin(&mut self, now: f64, bytes: f64, resources: &[u32], foresee: &mut impl FnMut(End)) -> Flow {
        let flow = self.free.pop().unwrap_or_else(|| {
            self.flows.push(Under::default());
            self.flows.len() - 1
        });
        let under = &mut self.flows[flow];
        under.links.clear();
        under.pools.clear();
        for resource in resources {
            let is_pool = self.resources[*resource as usize].is_pool;
            if is_pool {
                under.pools.push(*resource)
            } else {
                under.links.push(*resource)
            }
            self.passing[*resource as usize].push(flow);
        }
        (under.bytes_left, under.rate, under.since) = (bytes, f64::INFINITY, now);
        (under.version, under.is_under_way) = (under.version + 1, true);
        self.look_anew();
        self.concern(flow);
        self.flows[flow].held_at = self.least_share(flow);
        for link in resources.iter().map(|resource| *resource as usize) {
            if !self.resources[link].is_pool {
                let share = self.share(link);
                self.each_passing(link, |flows, other| {
                    if share < flows.flows[other].held_at {
                        flows.flows[other].held_at = share;
                        flows.concern(other);
                    }
                });
            }
        }
        self.share_anew(now, foresee);
        flow
    }

    /// Whether an end that was foreseen has come; then the transfer is over and others go faster.
    pub fn end(&mut self, end: End, foresee: &mut impl FnMut(End)) -> bool {
        let under = &mut self.flows[end.flow];
        if !under.is_under_way || under.version != end.version {
            return false;
        }
        under.is_under_way = false;
        let (links, pools) = (std::mem::take(&mut under.links), std::mem::take(&mut under.pools));
        self.look_anew();
        for resource in links.iter().chain(&pools) {
            self.passing[*resource as usize].retain(|flow| *flow != end.flow);
        }
        for link in links.iter().map(|link| *link as usize) {
            let before = self.resources[link].bytes_per_second / (self.passing[link].len() + 1) as f64;
            self.each_passing(link, |flows, other| {
                // Who is held up by another link does not gain.
                if before <= flows.flows[other].held_at {
                    let share = flows.least_share(other);
                    if share != flows.flows[other].held_at {
                        flows.flows[other].held_at = share;
                        flows.concern(other);
                    }
                }
            });
        }
        self.pools.extend(&pools);
        let under = &mut self.flows[end.flow];
        (under.links, under.pools) = (links, pools);
        self.free.push(end.flow);
        self.share_anew(end.at, foresee);
        true
    }

    fn look_anew(&mut self) {
        self.changes += 1;
        self.concerned.clear();
        self.pools.clear();
    }

    /// Notes that a transfer's rate may change. Each is noted once.
    fn concern(&mut self, flow: Flow) {
        if self.flows[flow].seen != self.changes {
            self.flows[flow].seen = self.changes;
            self.concerned.push(flow);
        }
    }

    fn each_passing(&mut self, resource: usize, mut look: impl FnMut(&mut Flows, Flow)) {
        for place in 0..self.passing[resource].len() {
            let flow = self.passing[resource][place];
            look(self, flow);
        }
    }

    /// Rates of all whose links have other shares now, or who pass a pool that one of those passes too.
    fn share_anew(&mut self, now: f64, foresee: &mut impl FnMut(End)) {
        for place in 0..self.concerned.len() {
            let Flows { flows, pools, concerned, .. } = self;
            pools.extend(&flows[concerned[place]].pools);
        }
        self.pools.sort_unstable();
        self.pools.dedup();
        let pools = std::mem::take(&mut self.pools);
        for pool in pools.iter().map(|pool| *pool as usize) {
            let level = self.level(pool);
            if level != self.levels[pool] {
                self.levels[pool] = level;
                self.each_passing(pool, |flows, other| flows.concern(other));
            }
        }
        self.pools = pools;
        for place in 0..self.concerned.len() {
            let flow = self.concerned[place];
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

    /// An even share of a resource that is no pool.
    fn share(&self, resource: usize) -> f64 {
        self.resources[resource].bytes_per_second / self.passing[resource].len().max(1) as f64
    }

    fn least_share(&self, flow: Flow) -> f64 {
        let links = self.flows[flow].links.iter();
        links.map(|link| self.share(*link as usize)).fold(f64::MAX, f64::min)
    }

    /// What each may take of a pool: more than an even share, where links hold others below theirs.
    fn level(&mut self, pool: usize) -> f64 {
        let Flows { flows, passing, held_at, resources, .. } = self;
        held_at.clear();
        held_at.extend(passing[pool].iter().map(|flow| flows[*flow].held_at));
        held_at.sort_unstable_by(f64::total_cmp);
        let mut left = resources[pool].bytes_per_second;
        for (place, held_at_link) in held_at.iter().enumerate() {
            let even = left / (held_at.len() - place) as f64;
            if *held_at_link > even {
                return even;
            }
            left -= held_at_link;
        }
        resources[pool].bytes_per_second
    }

    fn rate(&self, flow: Flow) -> f64 {
        let Under { pools, held_at, .. } = &self.flows[flow];
        pools.iter().map(|pool| self.levels[*pool as usize]).fold(*held_at, f64::min)
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
        let narrow = flows.begin(0.0, 1.0, &[7, 8], &mut |_| {});
        assert_eq!(flows.concerned, [narrow, wide]);
        // Where a second one is as slow as the first made it, nobody else is concerned.
        let third = flows.begin(0.0, 1.0, &[9], &mut |_| {});
        assert_eq!(flows.concerned, [third]);
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

    /// What all rates are, from nothing but who passes what.
    fn rates(flows: &Flows) -> Vec<Option<f64>> {
        let of = |under: &Under| {
            let least = |under: &Under| {
                under.links.iter().map(|link| flows.share(*link as usize)).fold(f64::MAX, f64::min)
            };
            let level = |pool: &u32| {
                let mut held_at: Vec<f64> =
                    flows.passing[*pool as usize].iter().map(|flow| least(&flows.flows[*flow])).collect();
                held_at.sort_unstable_by(f64::total_cmp);
                let mut left = flows.resources[*pool as usize].bytes_per_second;
                for (place, held_at_link) in held_at.iter().enumerate() {
                    let even = left / (held_at.len() - place) as f64;
                    if *held_at_link > even {
                        return even;
                    }
                    left -= held_at_link;
                }
                flows.resources[*pool as usize].bytes_per_second
            };
            under.is_under_way.then(|| under.pools.iter().map(level).fold(least(under), f64::min))
        };
        flows.flows.iter().map(of).collect()
    }

    #[test]
    fn rates_that_change_with_the_neighbours_are_those_of_all_anew() {
        let mut numbers = 1u64;
        let mut draw = |below: u64| {
            numbers = numbers.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (numbers >> 33) % below
        };
        let resource = |number: u64, rate: u64| Resource {
            bytes_per_second: 1.0 + rate as f64,
            is_pool: number.is_multiple_of(3),
        };
        for _ in 0..50 {
            let mut flows = Flows::new((0..12).map(|number| resource(number, draw(20))).collect());
            let mut foreseen: Vec<End> = Vec::new();
            let mut now = 0.0;
            for _ in 0..60 {
                if draw(3) > 0 {
                    let set = draw(1 << 12) & draw(1 << 12);
                    let passed: Vec<u32> = (0..12).filter(|number| set >> number & 1 == 1).collect();
                    if !passed.is_empty() {
                        flows.begin(now, 1.0 + draw(100) as f64, &passed, &mut |end| foreseen.push(end));
                    }
                } else {
                    foreseen.sort_by(|a, b| b.at.total_cmp(&a.at));
                    if let Some(end) = foreseen.pop()
                        && flows.end(end, &mut |end| foreseen.push(end))
                    {
                        now = end.at;
                    }
                }
                for (under, rate) in flows.flows.iter().zip(rates(&flows)) {
                    assert_eq!(rate.unwrap_or(under.rate), under.rate);
                }
            }
        }
    }
}
