"""The records that pass between rooms: Plan, Measurement, and the entries of a Ledger.

Every picture and every audit is a pure view of these, so it can be redrawn later, elsewhere, without the hardware. Bytes are
integers, seconds are floats, tokens count what the loss or the padding really held.
"""

from __future__ import annotations

from brim.records.emulations import Emulation as Emulation
from brim.records.findings import (
    Confidence as Confidence,
    Diagnosis as Diagnosis,
    Finding as Finding,
    InForce as InForce,
    Severity as Severity,
)
from brim.records.ledgers import (
    BudgetLimit as BudgetLimit,
    Ledger as Ledger,
    LedgerEntry as LedgerEntry,
    LedgerHeader as LedgerHeader,
    LedgerSummary as LedgerSummary,
    Pulse as Pulse,
    Real as Real,
    Slice as Slice,
    Split as Split,
    Totals as Totals,
)
from brim.records.measurements import (
    AffineFit as AffineFit,
    LoaderSettings as LoaderSettings,
    Measurement as Measurement,
    Objective as Objective,
    Proven as Proven,
    ShapePoint as ShapePoint,
    Trial as Trial,
    TrialVerdict as TrialVerdict,
    Versus as Versus,
)
from brim.records.observations import Observation as Observation
from brim.records.predictions import (
    Advice as Advice,
    Candidate as Candidate,
    DataReport as DataReport,
    Estimate as Estimate,
    MemoryPrediction as MemoryPrediction,
    Plan as Plan,
    Saving as Saving,
    SpeedPrediction as SpeedPrediction,
    Strategy as Strategy,
)
from brim.records.runs import (
    BadRow as BadRow,
    DataCard as DataCard,
    Evaluation as Evaluation,
    FileDamage as FileDamage,
    Launcher as Launcher,
    LossOn as LossOn,
    PartCheck as PartCheck,
    PartVerdict as PartVerdict,
    RunCard as RunCard,
    RunCheck as RunCheck,
    RunOptions as RunOptions,
    Schedule as Schedule,
    TrainingRecipe as TrainingRecipe,
    TrainingResult as TrainingResult,
)
from brim.records.scaling import (
    BatchGuide as BatchGuide,
    BatchPoint as BatchPoint,
    ScalePoint as ScalePoint,
    Scaling as Scaling,
    Wire as Wire,
)
from brim.records.verifications import (
    Proof as Proof,
    ProofName as ProofName,
    ProofVerdict as ProofVerdict,
    Verification as Verification,
)
