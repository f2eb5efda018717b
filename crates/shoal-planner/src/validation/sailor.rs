//! Per-layer profiles, and exact plans with the step times and memory that were measured: 24 layers of a GPT-2's blocks
//! (published as OPT-350) on up to 32 machines of four GPUs. Times come from the profiles and bandwidths alone, sizes
//! from the model's arithmetic; nothing is fitted to a measured step.
//!
//! Their engine exchanges [in its stream](super::in_stream). What it gathers a message into is made on the host, zeroed,
//! and copied to the GPU, every time: as many bytes as the message over the way from the host. (The zeroing takes time
//! too; nothing that was published says how much, so it is left out.) Gradients of a stage are one flat fp32 message, a
//! ring; every replica updates all its parameters.
//!
//! - [`read`]: the files.
//! - [`run`]: a plan that was run, checked, and its table.
//! - [`memory`]: what it keeps.

mod memory;
mod read;
mod run;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Serialize;
use shoal_fleet::{Costs, Device, Fleet, KindTable, LayerTable, Link, Node, catalogue};
use shoal_model::{Chain, presets};
use shoal_plan::{Layout, Purpose, compile_paced};
use shoal_sim::{FleetWorld, Settings, simulate};

use self::read::{Bandwidths, File, IntraNode, LayerSize, Measured, Profile, Sizes, Training};
use self::run::{GroupOf, Run};
use super::comparison::{Compared, Group, Row};
use super::error::Error;
use super::in_stream::{InStream, Place};
use super::{NO_HOST, parameters};

/// A plan that was measured, and what we say of it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Step {
    pub name: String,
    pub stages: usize,
    pub replicas: usize,
    pub micro_batch: usize,
    pub micro_batches: usize,
    pub seconds: Compared,
    /// Of the fullest GPU.
    pub bytes: Compared,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    pub steps: Vec<Step>,
    /// Of seconds.
    pub seconds: Vec<Group>,
    /// Of bytes.
    pub bytes: Vec<Group>,
}

/// Sets every measured plan of the folder beside its prediction.
pub fn report(folder: &Path) -> Result<Report, Error> {
    let data = Data::read(folder)?;
    let measured = read::measured(folder)?;
    let steps =
        measured.iter().map(|(name, file)| data.step(name, file)).collect::<Result<Vec<Step>, Error>>()?;
    Ok(Report::of(steps))
}

impl Report {
    fn of(steps: Vec<Step>) -> Report {
        type Choice = (&'static str, fn(&Step) -> bool);
        let choices: [Choice; 5] = [
            ("micro-batch 2 or more", |step| step.micro_batch >= 2),
            ("one or two stages, micro-batch 8", |step| step.stages <= 2 && step.micro_batch == 8),
            ("four stages, micro-batch 8", |step| step.stages == 4 && step.micro_batch == 8),
            ("one stage, micro-batch 2 and 4", |step| (2..8).contains(&step.micro_batch)),
            ("micro-batch 1", |step| step.micro_batch == 1),
        ];
        let groups = |of: fn(&Step) -> Compared| {
            let rows = |choice: fn(&Step) -> bool| -> Vec<Row> {
                let chosen = steps.iter().filter(|step| choice(step));
                chosen.map(|step| Row { name: step.name.clone(), compared: of(step) }).collect()
            };
            choices.iter().filter_map(|(name, choice)| Group::of(*name, &rows(*choice))).collect()
        };
        Report { seconds: groups(|step| step.seconds), bytes: groups(|step| step.bytes), steps }
    }
}

/// All that predictions come from.
struct Data {
    folder: PathBuf,
    training: File<Training>,
    sizes: File<Sizes>,
    between: File<Bandwidths>,
    within: File<IntraNode>,
}

impl Data {
    fn read(folder: &Path) -> Result<Data, Error> {
        Ok(Data {
            training: File::read(folder.join("training_config_opt_350.json"))?,
            sizes: File::read(folder.join("llm_info.json"))?,
            between: File::read(folder.join("multizone_bandwidths.json"))?,
            within: File::read(folder.join("intra_node_bandwidths.json"))?,
            folder: folder.into(),
        })
    }

    fn size(&self, degree: usize, layer: usize) -> Result<&LayerSize, Error> {
        let model = &self.training.is.model;
        let of = self.sizes.is.get(model).and_then(|degrees| degrees.get(&degree)?.get(&layer));
        of.ok_or_else(|| self.sizes.missing(format!("{model}.{degree}.{layer}")))
    }

    /// The model as its sizes say: a GPT-2 whose head has a matrix of its own, and as many words as that matrix has rows
    /// (they were padded). The configuration's other vocabulary is that of the model it is named after.
    fn chain(&self) -> Result<Chain, Error> {
        let config = &self.training.is;
        let (width, last) = (config.hidden_size, config.num_layers + 1);
        // The last norm has a weight and a bias.
        let matrix = self.size(1, last)?.params_floats.saturating_sub(2 * width as u64);
        let vocabulary = (matrix as usize).checked_div(width).unwrap_or(0);
        let mut model =
            presets::gpt2(vocabulary, width, config.num_layers, config.heads, config.max_position_embeddings);
        model.tied = false;
        if let Some(what) = model.defect() {
            return Err(self.training.wrong("the model", what));
        }
        let chain = Chain::new(&model);
        for layer in 0..=last {
            let (found, stated) = (parameters(&chain, layer), self.size(1, layer)?.params_floats);
            if found != stated {
                let key = format!("{}.1.{layer}.params_floats", config.model);
                return Err(self
                    .sizes
                    .wrong(key, format!("is {stated}, the model's arithmetic gives {found}")));
            }
        }
        Ok(chain)
    }

    fn profile(&self, gpu: &str) -> Result<File<Profile>, Error> {
        File::read(self.folder.join(format!("profile_{}_{gpu}_profile.json", self.training.is.model)))
    }

    /// Between two groups, all of whose GPUs send at once.
    fn link(&self, from: &GroupOf, to: &GroupOf) -> Result<Link, Error> {
        let [a, b] = [from, to].map(|group| (&group.zone, &group.gpu, group.degree));
        let key = format!("{}.{}.{}.{}.{}.{}", a.0, a.1, a.2, b.0, b.1, b.2);
        let found = self.between.is.get(a.0).and_then(|gpus| {
            let there = gpus.get(a.1)?.get(&a.2)?;
            there.get(b.0)?.get(b.1)?.get(&b.2)
        });
        read::link(&self.between, &key, found.ok_or_else(|| self.between.missing(&key))?)
    }

    fn link_within(&self, group: &GroupOf) -> Result<Option<Link>, Error> {
        if group.degree == 1 {
            return Ok(None);
        }
        let key = format!("{}.{}", group.gpu, group.degree);
        let found = self.within.is.get(&group.gpu).and_then(|degrees| degrees.get(&group.degree));
        read::link(&self.within, &key, found.ok_or_else(|| self.within.missing(&key))?).map(Some)
    }

    fn step(&self, name: &str, file: &File<Measured>) -> Result<Step, Error> {
        let chain = self.chain()?;
        let run = Run::new(file, &chain)?;
        let fleet = self.fleet(&run)?;
        let costs = self.costs(&run, &chain, &fleet)?;
        let plan = run.table(&chain, self.training.is.sequence_length);
        let layout = Layout::new(&plan, &chain);
        let (places, reduce_seconds) = self.places(&run, &chain, &fleet)?;
        let boundary_bytes = self.size(1, 0)?.act_output_bytes;
        let world =
            InStream::new(FleetWorld::new(&fleet, &costs, &layout), places, boundary_bytes, reduce_seconds);
        let programs = compile_paced(&plan, &chain, Purpose::Train, &world)
            .map_err(|cause| Error::Compile { name: name.into(), cause })?;
        let simulated = simulate(&programs, &layout, &world, Settings::default())
            .map_err(|cause| Error::Simulate { name: name.into(), cause })?;
        let mut peak = 0;
        for (device, group) in run.groups.iter().enumerate() {
            let layers = &run.stages[device / run.replicas];
            let under_way = memory::most_under_way(&programs[device], layers[0]);
            peak = peak.max(self.peak_bytes(group, layers, under_way, run.micro_batch)?);
        }
        Ok(Step {
            name: name.into(),
            stages: run.stages.len(),
            replicas: run.replicas,
            micro_batch: run.micro_batch,
            micro_batches: run.global_batch.div_ceil(run.replicas * run.micro_batch),
            seconds: Compared::new(simulated.seconds, file.is.real),
            bytes: Compared::new(peak as f64, file.is.max_mem as f64),
        })
    }

    fn peak_bytes(
        &self,
        group: &GroupOf,
        layers: &[usize],
        under_way: usize,
        micro_batch: usize,
    ) -> Result<u64, Error> {
        let config = &self.training.is;
        let last = layers[layers.len() - 1];
        let working_bytes = match last > config.num_layers {
            // The gradient of the logits.
            true => self.size(group.degree, last)?.act_output_bytes,
            false => memory::attention_working_bytes(config.heads, group.degree, config.sequence_length),
        };
        let layers = layers.iter().map(|layer| self.size(group.degree, *layer)).collect::<Result<_, _>>()?;
        Ok(memory::peak_bytes(&memory::Stage { layers, under_way, micro_batch, working_bytes }))
    }

    /// A machine for each group: what joins them is all that is known of it.
    fn fleet(&self, run: &Run) -> Result<Fleet, Error> {
        let (mut nodes, mut devices) = (Vec::new(), Vec::new());
        let mut zones: Vec<String> = run.groups.iter().map(|group| group.zone.clone()).collect();
        zones.sort();
        zones.dedup();
        for (number, group) in run.groups.iter().enumerate() {
            nodes.push(Node {
                name: format!("machine {number}"),
                zone: zones.binary_search(&group.zone).unwrap_or(0),
                host_memory_bytes: 0,
                host_bytes_per_second: NO_HOST.bytes_per_second,
                disk: None,
                network: self.link(group, group)?,
                device_link: None,
                devices: number..number + 1,
            });
            devices.push(Device {
                name: format!("group {number}"),
                kind: group.kind(),
                node: number,
                memory_bytes: 0,
                dollars_per_hour: 0.0,
                on_demand_dollars_per_hour: None,
                spot: false,
                host_link: NO_HOST,
                host_link_stated: true,
            });
        }
        let (zone_link, pairs) = (NO_HOST, BTreeMap::new());
        Ok(Fleet { nodes, devices, zones, zone_link, zone_pairs: pairs.clone(), node_pairs: pairs })
    }

    fn costs(&self, run: &Run, chain: &Chain, fleet: &Fleet) -> Result<Costs, Error> {
        let count = chain.layers.len();
        let mut tables: Vec<KindTable> = Vec::new();
        for group in &run.groups {
            if tables.iter().any(|table| table.kind == group.kind()) {
                continue;
            }
            let profile = self.profile(&group.gpu)?;
            let (forward, backward) = read::curves(&profile, group.degree, count)?;
            let key = || format!("{}.{}", run.micro_batch, group.degree);
            let times = profile.is.get(&run.micro_batch).and_then(|degrees| degrees.get(&group.degree));
            let times = times.ok_or_else(|| profile.missing(key()))?;
            // Stated a layer, the same for all: the optimizer's whole time, divided by their number.
            let update: f64 = times.values().map(|[_, _, update]| update).sum();
            let all: u64 = (0..count).map(|layer| parameters(chain, layer)).sum();
            let update_seconds_per_parameter = update / all as f64;
            tables.push(KindTable { kind: group.kind(), forward, backward, update_seconds_per_parameter });
        }
        let layers = (0..count).map(|layer| {
            Ok(LayerTable {
                name: chain.layers[layer].name.clone(),
                parameters: parameters(chain, layer),
                output_bytes: self.size(1, layer)?.act_output_bytes,
            })
        });
        let layers = layers.collect::<Result<Vec<_>, Error>>()?;
        Costs::from_tables(layers, &tables, fleet)
            .map_err(|cause| Error::Costs { name: self.training.is.model.clone(), cause })
    }

    /// Where each device stands, and how long the slowest stage adds up its gradients.
    fn places(&self, run: &Run, chain: &Chain, fleet: &Fleet) -> Result<(Vec<Place>, f64), Error> {
        let mut places = Vec::new();
        let mut reduce_seconds: f64 = 0.0;
        for (device, group) in run.groups.iter().enumerate() {
            let (stage, replicas) = (device / run.replicas, run.replicas);
            let layers = &run.stages[stage];
            let neighbour = |there: Option<usize>| {
                let there = there.filter(|there| *there < run.groups.len())?;
                Some(self.link(group, &run.groups[there]))
            };
            places.push(Place {
                first_layer: layers[0],
                last_layer: layers[layers.len() - 1],
                before: neighbour(device.checked_sub(replicas)).transpose()?,
                behind: neighbour(Some(device + replicas)).transpose()?,
                host: Some(host_link(&group.gpu)?),
                within: self.link_within(group)?,
                degree: group.degree,
            });
            let next = stage * replicas + (device + 1) % replicas;
            let bytes: u64 = layers.iter().map(|layer| 4 * parameters(chain, *layer)).sum();
            let seconds = ring_seconds(&fleet.link(device, next), replicas, bytes as f64);
            reduce_seconds = reduce_seconds.max(seconds);
        }
        Ok((places, reduce_seconds))
    }
}

/// Seconds in which a ring of so many adds up bytes that each of them has.
fn ring_seconds(link: &Link, members: usize, bytes: f64) -> f64 {
    match members {
        0 | 1 => 0.0,
        _ => link.seconds((2.0 * bytes * (members - 1) as f64 / members as f64) as u64),
    }
}

/// By the catalogue: none was published.
fn host_link(gpu: &str) -> Result<Link, Error> {
    let unknown = || shoal_fleet::Error::UnknownKind { kind: gpu.into(), nearest: catalogue::nearest(gpu) };
    let kind = catalogue::find(gpu).ok_or_else(unknown);
    Ok(kind.map_err(|cause| Error::Costs { name: gpu.into(), cause })?.host_link())
}
